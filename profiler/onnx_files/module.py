"""A trainable module rebuilt from an ONNX file: the way to the training step of anyone's file.

    ONNX file -> steps -> put together (`operators.patterns`) -> run in PyTorch (`operators`)

The module lies on the meta device: it is made of the shapes in the file, so the file may have no
weights, or have lost them. All floats are fp32. What a file leaves open stays unknown: which
operators ran in place, and what an exporter folded into something else, such as batch norms that
became part of convolutions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from trappm.profiler.errors import TrappmError, UnsupportedModelError, one_line
from trappm.profiler.onnx_files.folding import Array, fold, shape_value
from trappm.profiler.onnx_files.opening import CheckedModel
from trappm.profiler.onnx_files.operation import Operation
from trappm.profiler.onnx_files.operators.arithmetic import FUNCTIONS
from trappm.profiler.onnx_files.operators.call import Call, Value, torch_type
from trappm.profiler.onnx_files.operators.patterns import Step, put_together
from trappm.profiler.onnx_files.stored import Kind, value_of

MAX_STEPS = 12_000
"""Of what is run in PyTorch, a millisecond each; more than the largest timm model has."""

_STANDARD = ("", "ai.onnx")
_NOTHING: Array = np.zeros(0)


class RebuiltModule(nn.Module):
    """Runs the operators of a checked ONNX model in PyTorch, on the meta device, in training mode.

    Its parameters are the weights that training changes (`CheckedModel.parameters`), its buffers
    the other tensors whose values are not known. Running it raises UnsupportedModelError where the
    file has an operator without a form in PyTorch, or one that hangs on values.

    Raises:
        UnsupportedModelError: there are more operators than can be run in reasonable time.
    """

    def __init__(self, model: CheckedModel) -> None:
        super().__init__()
        if len(model.operations) > MAX_STEPS:
            raise UnsupportedModelError(
                f"its {len(model.operations):,} operators are not traced; at most {MAX_STEPS:,} are"
            )
        opsets = {o.domain: o.version for o in model.source.opset_import}
        self._opset = max(opsets.get(domain, 1) for domain in _STANDARD)
        self._image = model.image
        self.image_type = torch_type(model.image_kind)
        """Of the images that the file takes."""
        self._constants: dict[str, Array] = {}
        self._attribute_of: dict[str, str] = {}
        steps = [_step(operation) for operation in model.operations]
        factors = _factors(steps)
        for name, tensor in model.constants.items():
            if name in model.parameters:
                self._add(name, (tensor.data_type, tuple(tensor.dims)), True, name in factors)
            else:
                self._constants[name] = value_of(name, tensor)
        for name, kind in model.weights.items():
            self._add(name, kind, name in model.parameters, name in factors)
        self._outputs = model.outputs
        self._steps = put_together(
            steps, set(self._outputs), self._constants, model.image, self._attribute_of.keys()
        )
        self._folds = [onnx.NodeProto(op_type=s.operator, output=s.outputs) for s in self._steps]
        self._last_uses = list(_last_uses(self._steps, self._outputs))

    @property
    def operators(self) -> set[str]:
        """Names of the operators that run."""
        return {step.operator for step in self._steps}

    def _add(self, name: str, kind: Kind, trained: bool, factor: bool) -> None:
        element_type, shape = kind
        attribute = f"weight{len(self._attribute_of)}"
        # PyTorch's linear layers hold the matrix so, and their gradients are not copied.
        turned = factor and len(shape) == 2
        size = shape[::-1] if turned else shape
        tensor = torch.empty(size, dtype=torch_type(element_type), device="meta")
        if trained:
            self.register_parameter(attribute, nn.Parameter(tensor))
        else:
            self.register_buffer(attribute, tensor)
        self._attribute_of[name] = attribute + (".t" if turned else "")

    def forward(self, images: Tensor) -> Any:
        """One output, or a list of those that there are."""
        values: dict[str, Value] = {"": None, self._image: images, **self._constants}
        for name, attribute in self._attribute_of.items():
            tensor = getattr(self, attribute.removesuffix(".t"))
            values[name] = tensor.t() if attribute.endswith(".t") else tensor
        for step, node, last in zip(self._steps, self._folds, self._last_uses, strict=True):
            values.update(zip(step.outputs, self._run(step, node, values), strict=False))
            for name in last:
                values.pop(name, None)
        outputs = [values[name] for name in self._outputs]
        return outputs[0] if len(outputs) == 1 else outputs

    def _run(
        self, step: Step, node: onnx.NodeProto, values: Mapping[str, Value]
    ) -> Sequence[Value]:
        inputs = [values[name] for name in step.inputs]
        if step.operator in ("Shape", "Size") and isinstance(inputs[0], Tensor):
            if step.operator == "Size":
                return [np.array(inputs[0].numel(), np.int64)]
            return [shape_value(step.attributes, inputs[0].shape)]
        if step.operator == "Identity":
            return inputs
        known = [_NOTHING if v is None else v for v in inputs if not isinstance(v, Tensor)]
        if len(known) == len(inputs):
            folded = fold(node, step.attributes, known)
            if folded:
                return folded
        if step.operator not in FUNCTIONS:
            raise UnsupportedModelError(f"the operator {step.operator} cannot be rebuilt")
        call = Call(step.operator, inputs, step.attributes, len(step.outputs), self._opset)
        try:
            result = FUNCTIONS[step.operator](call)
        except TrappmError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{step.operator} for {step.outputs[0]!r}: {one_line(error)}"
            ) from error
        return [result] if isinstance(result, Tensor) else result


def _step(operation: Operation) -> Step:
    return Step(operation.operator, operation.inputs, operation.outputs, operation.attributes)


def _factors(steps: Iterable[Step]) -> set[str]:
    """Names of what is only ever the second factor of a product."""
    second: set[str] = set()
    other: set[str] = set()
    for step in steps:
        for place, name in enumerate(step.inputs):
            (second if step.operator == "MatMul" and place == 1 else other).add(name)
    return second - other


def _last_uses(steps: Sequence[Step], outputs: Iterable[str]) -> Iterator[list[str]]:
    """For each step, the names that no later step needs."""
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        last.update(dict.fromkeys((*step.inputs, *step.outputs), number))
    kept = {"", *outputs}
    for number, step in enumerate(steps):
        names = dict.fromkeys((*step.inputs, *step.outputs))
        yield [name for name in names if name not in kept and last[name] == number]
