"""Finds the shape of every tensor of an ONNX model, for any shape of the image.

ONNX's own inference does the work in one go; where it stops, because a shape hangs on arithmetic
that it does not follow (Swin's windows, padding for stride), the rest is done node by node: the
arithmetic is computed here, and ONNX asked for the others. No tensor of the model is ever
allocated, whatever its shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference

from profiler.errors import UnsupportedModelError, one_line
from profiler.onnx_file import MAX_ELEMENTS, MAX_RANK, CheckedModel, attribute_value
from profiler.onnx_fold import Array, fold, shape_value

Shape = tuple[int, ...]
Attributes = Mapping[str, Any]

_MAX_LENGTH = 1 << 16
_MAX_AXES = 20_000_000
"""Bounds of what ONNX is given to do at once; no timm model comes near."""


class ShapeInference:
    """Shapes of the tensors that are asked for, at any shape of the image.

    Args:
        model: a checked model.
        depends: names of the tensors whose values depend on the pixels; they are not computed.
        wanted: names of the tensors whose shapes are asked for.

    Raises:
        UnsupportedModelError: a stored value cannot be read.
    """

    def __init__(self, model: CheckedModel, depends: set[str], wanted: Iterable[str]) -> None:
        self._model = model
        self._wanted = set(wanted)
        self._opsets = {opset.domain: opset.version for opset in model.proto.opset_import}
        self._constants: dict[str, Array] = {"": np.zeros(0)}
        for tensor in model.proto.graph.initializer:
            self._constants[tensor.name] = _value_of(tensor)
        self._nodes: list[tuple[onnx.NodeProto, Attributes, bool]] = []
        for node in model.proto.graph.node:
            attributes: Attributes = {}
            computable = depends.isdisjoint(node.output)
            if computable:
                attributes = {a.name: attribute_value(a) for a in node.attribute}
                if _compute(node, attributes, self._constants, {}):
                    continue
            self._nodes.append((node, attributes, computable))
        self._rest = self._without_constants()
        self._one_by_one = self._may_explode()
        self._given = _Known(self._constants)
        for value in self._rest.graph.input[1:]:
            self._given.add(value.name, value.type)

    def at(self, image_shape: Shape) -> dict[str, Shape]:
        """The shape of every wanted tensor, and of others.

        Raises:
            UnsupportedModelError: one cannot be inferred, or is beyond all bounds.
        """
        image = self._rest.graph.input[0].type.tensor_type
        for axis, size in zip(image.shape.dim, image_shape, strict=True):
            axis.dim_value = size
        known = self._given.copy()
        known.add(self._model.image, self._rest.graph.input[0].type)
        if not self._one_by_one:
            self._infer_at_once(known)
        if not self._wanted <= known.shapes.keys():
            self._one_by_one = True  # no use trying the other way at the next shape
            self._infer_one_by_one(known)
        unknown = sorted(self._wanted - known.shapes.keys())
        if unknown:
            raise UnsupportedModelError(f"the shape of tensor {unknown[0]!r} cannot be inferred")
        return known.shapes

    def _without_constants(self) -> onnx.ModelProto:
        """The model without what is computed already; what the exporter wrote of shapes, which
        holds for its own batch size only, is left out.
        """
        source = self._model.proto
        graph = onnx.GraphProto(name="rest")
        graph.node.extend(node for node, _, _ in self._nodes)
        used = {name for node in graph.node for name in node.input if name}
        made = {name for node in graph.node for name in node.output}
        for name in sorted(used & self._constants.keys()):
            graph.initializer.append(onnx.numpy_helper.from_array(self._constants[name], name))
        inputs = {value.name: value for value in source.graph.input}
        graph.input.append(inputs[self._model.image])
        graph.input.extend(
            value for name, value in inputs.items()
            if name in used and name != self._model.image and name not in self._constants
        )  # fmt: skip
        for output in source.graph.output:
            if output.name in made:
                kind = output.type.tensor_type.elem_type
                graph.output.append(onnx.helper.make_tensor_value_info(output.name, kind, None))
        return onnx.ModelProto(
            ir_version=source.ir_version, opset_import=source.opset_import, graph=graph
        )

    def _may_explode(self) -> bool:
        """Whether ONNX, given the whole model at once, might make shapes without end.

        It follows the values of shapes wherever they go: forty concatenations of one with itself
        would fill any memory, and so would many thousand axes added to one tensor. Of Range it
        makes every element.
        """
        lengths: dict[str, int] = {}
        added_axes = 0
        for node, _, computable in self._nodes:
            added_axes += self._axes_added(node)
            if node.op_type == "Range":
                return True
            if not computable:
                continue
            inputs = [lengths.get(name, MAX_RANK) for name in node.input]
            length = sum(inputs) if node.op_type == "Concat" else max(inputs, default=MAX_RANK)
            if length > _MAX_LENGTH:
                return True
            lengths.update((name, length) for name in node.output)
        return added_axes * len(self._nodes) > _MAX_AXES

    def _axes_added(self, node: onnx.NodeProto) -> int:
        if node.op_type != "Unsqueeze":
            return 0
        if len(node.input) > 1:
            axes = self._constants.get(node.input[1])
            return MAX_RANK if axes is None else axes.size
        return max((len(attribute.ints) for attribute in node.attribute), default=0)

    def _infer_at_once(self, known: _Known) -> None:
        try:
            graph = onnx.shape_inference.infer_shapes(self._rest, data_prop=True).graph
        except Exception as error:
            raise UnsupportedModelError(f"ONNX cannot infer shapes: {one_line(error)}") from error
        for value in (*graph.value_info, *graph.output):
            known.add(value.name, value.type)

    def _infer_one_by_one(self, known: _Known) -> None:
        for node, attributes, computable in self._nodes:
            if computable and _compute(node, attributes, known.values, known.shapes):
                for name in node.output:
                    known.shapes[name] = known.values[name].shape
            elif not all(name in known.shapes for name in node.output if name):
                self._infer_node(node, known)

    def _infer_node(self, node: onnx.NodeProto, known: _Known) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        given: dict[str, onnx.TypeProto] = {}
        for name in filter(None, node.input):
            kind = known.type_of(name)
            if kind is None:
                return
            given[name] = kind
        data = {
            name: onnx.numpy_helper.from_array(known.values[name], name)
            for name in given
            if name in known.values
        }
        try:
            schema = onnx.defs.get_schema(node.op_type, self._opsets.get(domain, 1), domain)
            types = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                given,
                data,
                opset_imports=list(self._model.proto.opset_import),
                ir_version=self._model.proto.ir_version,
            )
        except Exception as error:
            raise UnsupportedModelError(
                f"ONNX cannot infer the shape of {node.op_type} {node.name!r}: {one_line(error)}"
            ) from error
        for name, kind in types.items():
            known.add(name, kind)


def _value_of(tensor: onnx.TensorProto) -> Array:
    try:
        return onnx.numpy_helper.to_array(tensor)
    except Exception as error:
        raise UnsupportedModelError(
            f"the stored tensor {tensor.name!r} cannot be read: {one_line(error)}"
        ) from error


class _Known:
    """What is known at one shape of the image: values, types and shapes by tensor."""

    def __init__(self, constants: Mapping[str, Array]) -> None:
        self.values = dict(constants)
        self.shapes: dict[str, Shape] = {name: v.shape for name, v in constants.items() if name}
        self._types: dict[str, onnx.TypeProto] = {}

    def copy(self) -> _Known:
        other = _Known({})
        other.values, other.shapes = self.values.copy(), self.shapes.copy()
        other._types = self._types.copy()
        return other

    def add(self, name: str, kind: onnx.TypeProto) -> None:
        """Takes a type as inferred, if it is that of a tensor whose shape is complete.

        Raises:
            UnsupportedModelError: the shape is beyond all bounds.
        """
        tensor = kind.tensor_type
        if not tensor.HasField("shape"):
            return
        if len(tensor.shape.dim) > MAX_RANK:
            raise UnsupportedModelError(f"tensor {name!r} would have {len(tensor.shape.dim)} axes")
        shape = tuple(axis.dim_value for axis in tensor.shape.dim)
        if 0 in shape and not all(axis.HasField("dim_value") for axis in tensor.shape.dim):
            return  # an open axis reads as 0
        if min(shape, default=0) < 0 or math.prod(shape) > MAX_ELEMENTS:
            raise UnsupportedModelError(f"tensor {name!r} would have the shape {shape}")
        self.shapes[name] = shape
        self._types[name] = kind

    def type_of(self, name: str) -> onnx.TypeProto | None:
        if name not in self._types and name in self.values:
            value = self.values[name]
            kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            self._types[name] = onnx.helper.make_tensor_type_proto(kind, value.shape)
        return self._types.get(name)


def _compute(
    node: onnx.NodeProto,
    attributes: Attributes,
    values: dict[str, Array],
    shapes: Mapping[str, Shape],
) -> bool:
    """Adds the node's outputs to the values, if they follow from these values and shapes."""
    if node.op_type in ("Shape", "Size") and node.input and node.input[0] in shapes:
        shape = shapes[node.input[0]]
        is_shape = node.op_type == "Shape"
        size = np.array(math.prod(shape), np.int64)
        values[node.output[0]] = shape_value(attributes, shape) if is_shape else size
        return True
    if not all(name in values for name in node.input):
        return False
    outputs = fold(node, attributes, [values[name] for name in node.input])
    values.update(zip(node.output, outputs, strict=False))
    return bool(outputs)
