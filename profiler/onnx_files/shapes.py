"""Finds the shape of every tensor of an ONNX model, for any shape of the image.

Node by node: arithmetic on shapes is computed (`folding`), common operators have rules
(`shape_rules`), and ONNX's own inference answers for all others. At a second shape of the image
only what depends on the difference is done again. No tensor of the model is ever allocated,
whatever its shape, and ONNX is given single nodes only, so no file can keep it busy for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx.shape_inference

from trappm.profiler.errors import UnsupportedModelError, one_line
from trappm.profiler.onnx_files.folding import Array, fold, shape_value
from trappm.profiler.onnx_files.opening import CheckedModel
from trappm.profiler.onnx_files.operation import Operation
from trappm.profiler.onnx_files.shape_rules import UNUSUAL, Rule, Shape, rule_for
from trappm.profiler.onnx_files.stored import MAX_ELEMENTS, MAX_RANK, value_of

_INT64 = ("Shape", "Size", "ArgMax", "ArgMin")
_BOOL = (
    "And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not",
    "Or", "Xor",
)  # fmt: skip
_KINDS: Mapping[str, int] = {
    **dict.fromkeys(_INT64, onnx.TensorProto.INT64),
    **dict.fromkeys(_BOOL, onnx.TensorProto.BOOL),
}
"""Element types of results that are not those of the first input."""


class ShapeInference:
    """Shapes of the wanted tensors, at any shape of the image.

    Args:
        model: a checked model.
        depends: names of the tensors whose values depend on the pixels; they are not computed.
        wanted: names of the tensors whose shapes are needed.

    Raises:
        UnsupportedModelError: a stored value cannot be read.
    """

    def __init__(self, model: CheckedModel, depends: set[str], wanted: Iterable[str]) -> None:
        self._model = model
        self._wanted = set(wanted)
        self._opsets = {o.domain or "ai.onnx": o.version for o in model.source.opset_import}
        self._kinds = {name: kind for name, (kind, _) in model.weights.items()}
        self._kinds[model.image] = model.image_kind
        self._known = _Known({"": np.zeros(0)}, {"": ()})
        self._known.shapes.update((name, shape) for name, (_, shape) in model.weights.items())
        self._steps: list[tuple[Operation, Rule | None, bool]] = []
        for operation in _needed(model.operations, self._wanted):
            for name in operation.inputs:
                if name in model.constants and name not in self._known.values:
                    self._known.set_value(name, value_of(name, model.constants[name]))
            computable = depends.isdisjoint(operation.outputs)
            self._steps.append((operation, rule_for(operation), computable))

    def at(self, image_shape: Shape) -> Mapping[str, Shape]:
        """The shape of every wanted tensor, and of others.

        Raises:
            UnsupportedModelError: one cannot be inferred, or is beyond all bounds.
        """
        image, before = self._model.image, self._known
        is_first = image not in before.shapes
        known = _Known(before.values.copy(), before.shapes.copy())
        known.set_shape(image, image_shape)
        changed = {image}
        for operation, rule, computable in self._steps:
            if not is_first:
                if changed.isdisjoint(operation.inputs):
                    continue
                known.forget(operation.outputs)
            if not (computable and _compute(operation, known)):
                self._infer(operation, rule, known)
            if not is_first:
                changed.update(known.differing(operation.outputs, before))
        unknown = sorted(self._wanted - known.shapes.keys())
        if unknown:
            raise UnsupportedModelError(f"the shape of tensor {unknown[0]!r} cannot be inferred")
        self._known = known
        return known.shapes

    def value(self, name: str) -> Array | None:
        """What a tensor was found to hold at the last shape; None if it is not known."""
        return self._known.values.get(name)

    def _infer(self, operation: Operation, rule: Rule | None, known: _Known) -> None:
        try:
            inputs = [known.shapes[name] for name in operation.inputs]
        except KeyError:
            return  # the shape of an input is unknown, so is this one
        if rule is not None:
            try:
                outputs = rule(operation, inputs, known.values)
            except UNUSUAL:
                outputs = []
            if len(outputs) == len(operation.outputs):
                if operation.outputs[0] not in self._kinds and any(operation.inputs):
                    self._note_kind(operation, known)
                for name, shape in zip(operation.outputs, outputs, strict=True):
                    known.set_shape(name, shape)
                return
        self._ask_onnx(operation, known)

    def _note_kind(self, operation: Operation, known: _Known) -> None:
        """Element types do not depend on the image's shape: once found, they stay."""
        kind: int | None
        if operation.operator == "Cast":
            kind = operation.attributes.get("to")
        elif operation.operator == "ConstantOfShape":
            value = operation.attributes.get("value")
            kind = getattr(value, "data_type", onnx.TensorProto.FLOAT)
        elif operation.operator in _KINDS:
            kind = _KINDS[operation.operator]
        else:
            kind = self._kind(operation.inputs[operation.operator == "Where"], known)
        if kind is not None:
            self._kinds.update((name, kind) for name in operation.outputs)

    def _kind(self, name: str, known: _Known) -> int | None:
        if name in known.values:
            return int(onnx.helper.np_dtype_to_tensor_dtype(known.values[name].dtype))
        return self._kinds.get(name)

    def _ask_onnx(self, operation: Operation, known: _Known) -> None:
        given: dict[str, onnx.TypeProto] = {}
        version = self._opsets.get(operation.domain or "ai.onnx", 1)
        try:
            for name in filter(None, operation.inputs):
                kind = self._kind(name, known)
                if kind is None:
                    return
                given[name] = onnx.helper.make_tensor_type_proto(kind, known.shapes[name])
            data = {
                name: onnx.numpy_helper.from_array(known.values[name], name)
                for name in given
                if name in known.values
            }
            schema = onnx.defs.get_schema(operation.node.op_type, version, operation.domain)
            types = onnx.shape_inference.infer_node_outputs(
                schema,
                operation.node,
                given,
                data,
                opset_imports=list(self._model.source.opset_import),
                ir_version=self._model.source.ir_version,
            )
        except Exception as error:
            raise UnsupportedModelError(
                f"ONNX cannot infer the shape of {operation.operator} {operation.name!r}: "
                f"{one_line(error)}"
            ) from error
        for name, kind_and_shape in types.items():
            tensor = kind_and_shape.tensor_type
            axes = tensor.shape.dim
            is_open = not all(axis.HasField("dim_value") for axis in axes[: MAX_RANK + 1])
            if tensor.HasField("shape") and not is_open:
                self._kinds[name] = tensor.elem_type
                known.set_shape(name, tuple(axis.dim_value for axis in axes))


def _needed(operations: list[Operation], wanted: set[str]) -> list[Operation]:
    """The operations without which the shapes of these tensors are not known, in order."""
    names = set(wanted)
    needed = []
    for operation in reversed(operations):
        if not names.isdisjoint(operation.outputs):
            needed.append(operation)
            names.update(operation.inputs)
    return needed[::-1]


class _Known:
    """What is known at one shape of the image: values and shapes by tensor."""

    def __init__(self, values: dict[str, Array], shapes: dict[str, Shape]) -> None:
        self.values = values
        self.shapes = shapes

    def set_value(self, name: str, value: Array) -> None:
        if name:
            self.values[name] = value
            self.shapes[name] = value.shape

    def set_shape(self, name: str, shape: Shape) -> None:
        """Takes a shape as inferred.

        Raises:
            UnsupportedModelError: it is beyond all bounds.
        """
        if len(shape) > MAX_RANK:
            raise UnsupportedModelError(f"tensor {name!r} would have {len(shape)} axes")
        if math.prod(shape) > MAX_ELEMENTS or (shape and min(shape) < 0):
            raise UnsupportedModelError(f"tensor {name!r} would have the shape {shape}")
        if name:
            self.shapes[name] = shape

    def forget(self, names: Iterable[str]) -> None:
        for name in filter(None, names):
            self.values.pop(name, None)
            self.shapes.pop(name, None)

    def differing(self, names: Iterable[str], other: _Known) -> list[str]:
        """Those of these tensors that are not the same here as there."""
        return [
            name
            for name in filter(None, names)
            if self.shapes.get(name) != other.shapes.get(name)
            or not np.array_equal(self.values.get(name, _NONE), other.values.get(name, _NONE))
        ]


_NONE: Array = np.zeros(0)


def _compute(operation: Operation, known: _Known) -> bool:
    """Adds the operation's outputs to the values, if they follow from these values and shapes."""
    measured = operation.inputs[0] if operation.inputs else ""
    if operation.operator in ("Shape", "Size") and measured in known.shapes:
        shape = known.shapes[measured]
        is_shape = operation.operator == "Shape"
        size = shape_value(operation.attributes, shape) if is_shape else np.array(math.prod(shape))
        known.set_value(operation.outputs[0], size)
        return True
    try:
        inputs = [known.values[name] for name in operation.inputs]
    except KeyError:
        return False
    outputs = fold(operation.node, operation.attributes, inputs)
    for name, value in zip(operation.outputs, outputs, strict=False):
        known.set_value(name, value)
    return bool(outputs)
