"""ONNX operators that PyTorch has no form of: a graph has them as they are, a step does not.

Their shapes are what ONNX's own inference says of the single node. In PyTorch they are calls of
`trappm::onnx`, an operator that makes tensors of these shapes and computes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.shape_inference
import torch
from torch import Tensor

from trappm.profiler.errors import UnsupportedModelError, one_line
from trappm.profiler.onnx_files.operation import Operation
from trappm.profiler.onnx_files.operators.call import (
    Value,
    as_tensor,
    check_shape,
    onnx_type,
    torch_type,
)

_LIBRARY = torch.library.Library("trappm", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "onnx(Tensor[] inputs, str operator, str attributes, int[] ranks, int[] sizes, ScalarType[] "
    "types) -> Tensor[]"
)


def _make(
    inputs: Sequence[Tensor],
    operator: str,
    attributes: str,
    ranks: Sequence[int],
    sizes: Sequence[int],
    types: Sequence[torch.dtype],
) -> list[Tensor]:
    rest = iter(sizes)
    return [
        torch.empty([next(rest) for _ in range(rank)], dtype=dtype, device="meta")
        for rank, dtype in zip(ranks, types, strict=True)
    ]


_LIBRARY.impl("onnx", _make, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Dialect:
    """The versions of operators that a file is written in."""

    opsets: Sequence[onnx.OperatorSetIdProto]
    ir_version: int

    def version(self, domain: str) -> int:
        """Of the operators of a domain; of ONNX's own for the empty one."""
        names = ("", "ai.onnx") if domain in ("", "ai.onnx") else (domain,)
        return max((o.version for o in self.opsets if o.domain in names), default=1)


def run_unknown(operation: Operation, inputs: Sequence[Value], dialect: Dialect) -> list[Value]:
    """Outputs without values, of the shapes that ONNX infers.

    Raises:
        UnsupportedModelError: it infers none.
    """
    node = operation.node
    if node is None:
        raise UnsupportedModelError(f"{operation.operator} cannot be rebuilt")
    given: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    try:
        for name, value in zip(operation.inputs, inputs, strict=True):
            if isinstance(value, np.ndarray):
                data[name] = onnx.numpy_helper.from_array(value, name)
                kind = data[name].data_type
            elif value is not None:
                kind = onnx_type(value.dtype)
            else:
                continue
            given[name] = onnx.helper.make_tensor_type_proto(kind, value.shape)
        version = dialect.version(node.domain)
        types = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, version, node.domain),
            node,
            given,
            data,
            opset_imports=list(dialect.opsets),
            ir_version=dialect.ir_version,
        )
    except Exception as error:
        raise UnsupportedModelError(
            f"ONNX cannot infer the shape of {operation.operator} {node.name!r}: {one_line(error)}"
        ) from error
    inferred = [(name, *_inferred(types[name])) for name in operation.outputs if name in types]
    known = [(name, sizes, kind) for name, sizes, kind in inferred if sizes is not None]
    for name, sizes, _ in known:
        check_shape(name, sizes)
    made = torch.ops.trappm.onnx(
        [torch.empty((), device="meta") if value is None else as_tensor(value) for value in inputs],
        operation.operator,
        json.dumps(dict(operation.attributes), default=lambda value: type(value).__name__),
        [len(sizes) for _, sizes, _ in known],
        [size for _, sizes, _ in known for size in sizes],
        [torch_type(kind) for _, _, kind in known],
    )
    outputs = dict(zip((name for name, _, _ in known), made, strict=True))
    return [outputs.get(name) for name in operation.outputs]


def _inferred(kind_and_shape: onnx.TypeProto) -> tuple[list[int] | None, int]:
    """Sizes, if all are known, and element type of an output."""
    tensor = kind_and_shape.tensor_type
    axes = tensor.shape.dim
    if not tensor.HasField("shape") or not all(axis.HasField("dim_value") for axis in axes):
        return None, tensor.elem_type
    return [axis.dim_value for axis in axes], tensor.elem_type
