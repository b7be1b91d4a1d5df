"""A module rebuilt from an ONNX file, to trace its graph and training step.

    ONNX file -> operations -> fused (`patterns`) -> run in PyTorch (`operators`)

The module is on the meta device: it uses only shapes, so weights may be missing. All floats are
fp32. Unknown remains which operators ran in place and what an exporter folded; folded batch norms
are restored where that is clear (`folded_norms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from trappm.extensions.onnx.checked_model import CheckedModel, Kind, Operation, value_of
from trappm.extensions.onnx.constant_folding import Array, fold, shape_value
from trappm.extensions.onnx.operators import (
    FUNCTIONS,
    Dialect,
    NodeCall,
    Value,
    check_shape,
    run_unknown,
    torch_type,
)
from trappm.extensions.onnx.patterns import fuse_operations
from trappm.profiler.errors import TrappmError, UnsupportedModelError, one_line


@dataclass(frozen=True, eq=False)
class _Program:
    """Operations in order; immutable, so that copies of a module share it."""

    operations: Sequence[Operation]
    last_uses: Sequence[Sequence[str]]
    """Names that no later operation needs, by operation."""
    constants: Mapping[str, Array]
    attribute_of: Mapping[str, str]
    """Attributes of the module by names of weights in the file."""
    outputs: Sequence[str]
    used: frozenset[str]
    """Names that an operation or an output needs."""
    dialect: Dialect

    def __deepcopy__(self, _: Any) -> Self:
        return self


class RebuiltModule(nn.Module):
    """Runs the operators of a checked ONNX model in PyTorch, on the meta device.

    Its parameters are the trained weights (`CheckedModel.parameters`) and, frozen, those of small
    integers; its buffers are other tensors without known values. The results of operators without
    a form in PyTorch get the shapes that ONNX infers.

    Args:
        model: Result of `load_checked`.
        name: Name for messages.
    """

    batches: Tensor
    """Number of batches that norms have seen."""

    def __init__(self, model: CheckedModel, name: str = "the file") -> None:
        super().__init__()
        self._name = name
        self._inputs = tuple(entry.name for entry in model.inputs)
        self.input_types = tuple(torch_type(entry.kind) for entry in model.inputs)
        self.restored_norms = model.restored_norms
        constants: dict[str, Array] = {}
        attribute_of: dict[str, str] = {}
        factors = _factors(model.operations)
        kinds: dict[str, Kind] = dict(model.weights)
        for key, tensor in model.constants.items():
            if key in model.parameters or key in model.quantized:
                kinds[key] = tensor.data_type, tuple(tensor.dims)
            else:
                constants[key] = value_of(key, tensor)
        for key, kind in kinds.items():
            attribute = f"weight{len(attribute_of)}"
            # PyTorch's linear layers hold the matrix so, and their gradients are not copied.
            turned = key in factors and len(kind[1]) == 2
            self._add(attribute, kind, turned, key in model.parameters, key in model.quantized)
            attribute_of[key] = attribute + (".t" if turned else "")
        dialect = Dialect(list(model.source.opset_import), model.source.ir_version)
        operations = fuse_operations(
            list(_fold_constants(model.operations, constants, dialect.version(""))),
            set(model.outputs),
            constants,
            self._inputs,
            attribute_of.keys(),
        )
        if any(operation.operator == "BatchNormalization" for operation in operations):
            # Files leave out the counts of batches, which each norm of PyTorch increases.
            self.register_buffer("batches", torch.empty((), dtype=torch.int64, device="meta"))
        self._program = _Program(
            operations=operations,
            last_uses=list(_last_uses(operations, model.outputs)),
            constants=constants,
            attribute_of=attribute_of,
            outputs=model.outputs,
            used=frozenset((*model.outputs, *chain.from_iterable(o.inputs for o in operations)))
            - {""},
            dialect=dialect,
        )

    def _get_name(self) -> str:
        return self._name

    @property
    def operators(self) -> set[str]:
        """Names of the operators that run."""
        return {operation.operator for operation in self._program.operations}

    def _add(self, attribute: str, kind: Kind, turned: bool, trained: bool, frozen: bool) -> None:
        element_type, shape = kind
        size = shape[::-1] if turned else shape
        tensor = torch.empty(size, dtype=torch_type(element_type), device="meta")
        if trained or frozen:
            self.register_parameter(attribute, nn.Parameter(tensor, requires_grad=trained))
        else:
            self.register_buffer(attribute, tensor)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the output, or a list of several."""
        program = self._program
        values: dict[str, Value] = {"": None, **program.constants}
        values.update(zip(self._inputs, inputs, strict=True))
        for name, attribute in program.attribute_of.items():
            tensor = getattr(self, attribute.removesuffix(".t"))
            values[name] = tensor.t() if attribute.endswith(".t") else tensor
        for operation, last in zip(program.operations, program.last_uses, strict=True):
            given = [_value(operation, name, values) for name in operation.inputs]
            outputs = self._run(operation, given)
            for name, value in zip(operation.outputs, outputs, strict=False):
                if value is not None:
                    check_shape(name, value.shape)
                    values[name] = value
            for name in last:
                values.pop(name, None)
        results = [values[name] for name in program.outputs if name in values]
        return results[0] if len(results) == 1 else results

    def _run(self, operation: Operation, inputs: Sequence[Value]) -> Sequence[Value]:
        operator = operation.operator
        if operator in ("Shape", "Size") and isinstance(inputs[0], Tensor):
            if operator == "Size":
                return [np.array(inputs[0].numel(), np.int64)]
            return [shape_value(operation.attributes, inputs[0].shape)]
        if operator == "Identity":
            return inputs
        known = [value for value in inputs if not isinstance(value, Tensor)]
        if len(known) == len(inputs):
            folded = fold(operation, known, self._program.dialect.version(""))
            # Floats that are filled to a shape, such as first states, grow with the batch.
            filled = operator in ("ConstantOfShape", "Expand", "Tile") and folded
            if folded and not (filled and folded[0].dtype.kind == "f" and folded[0].ndim > 1):
                return folded
        try:
            return self._in_pytorch(operation, inputs)
        except UnsupportedModelError as error:
            try:
                return run_unknown(operation, inputs, self._program.dialect, str(error))
            except UnsupportedModelError as other:
                raise UnsupportedModelError(f"{error}; {other}") from error

    def _in_pytorch(self, operation: Operation, inputs: Sequence[Value]) -> Sequence[Value]:
        operator, names = operation.operator, operation.outputs
        if operator not in FUNCTIONS:
            raise UnsupportedModelError(f"the operator {operator} cannot be rebuilt")
        opset = self._program.dialect.version("")
        call = NodeCall(operator, inputs, operation.attributes, len(names), opset, self.training)
        if operator == "BatchNormalization" and self.training:
            self.batches.add_(1)
        try:
            result = FUNCTIONS[operator](call)
        except TrappmError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{operator} for {names[0]!r}: {one_line(error)}"
            ) from error
        results = [result] if isinstance(result, Tensor) else result
        if self._program.used.intersection(names[len(results) :]):
            raise UnsupportedModelError(f"a {operator} of {len(names)} outputs")
        return results


def _value(operation: Operation, name: str, values: Mapping[str, Value]) -> Value:
    if name not in values:
        raise UnsupportedModelError(
            f"{operation.operator} needs {name!r}, an output that cannot be rebuilt"
        )
    return values[name]


def _fold_constants(
    operations: Iterable[Operation], constants: dict[str, Array], opset: int
) -> Iterator[Operation]:
    """Yield all operations except those on constants, whose results become constants."""
    for operation in operations:
        if constants.keys() >= set(operation.inputs) - {""}:
            known = [constants.get(name) for name in operation.inputs]
            values = fold(operation, known, opset)
            if values:
                constants.update(zip(operation.outputs, values, strict=False))
                continue
        yield operation


def _factors(operations: Iterable[Operation]) -> set[str]:
    """Return the names of tensors that are only second factors of products."""
    second: set[str] = set()
    other: set[str] = set()
    for operation in operations:
        for place, name in enumerate(operation.inputs):
            (second if operation.operator == "MatMul" and place == 1 else other).add(name)
    return second - other


def _last_uses(operations: Sequence[Operation], outputs: Iterable[str]) -> Iterator[list[str]]:
    """Yield for each operation the names that no later one needs."""
    last: dict[str, int] = {}
    for number, operation in enumerate(operations):
        last.update(dict.fromkeys((*operation.inputs, *operation.outputs), number))
    kept = {"", *outputs}
    for number, operation in enumerate(operations):
        names = dict.fromkeys((*operation.inputs, *operation.outputs))
        yield [name for name in names if name not in kept and last[name] == number]
