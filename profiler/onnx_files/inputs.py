"""Which inputs of an ONNX graph are the images, and which are weights that the file leaves out.

Nothing in ONNX says so. A weight is recognised by its use: it is the kernel of a convolution, the
scale of a normalisation, the matrix that the features are multiplied by. Any other input is
something that a model is given when it runs, and a model of several inputs is refused: its cost
would be wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import onnx

from trappm.profiler.errors import ModelFileError, UnsupportedModelError
from trappm.profiler.onnx_files.operation import Operation
from trappm.profiler.onnx_files.stored import FLOATS, Kind, Stored, check_size

_WEIGHT_SLOTS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4),
    "CausalConvWithState": (1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "GRU": (1, 2, 3),
    "Gemm": (2,),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3),
    "LayerNormalization": (1, 2),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
    "RotaryEmbedding": (1, 2),
}
"""Places among a node's inputs that only weights take."""

_PRODUCTS = frozenset(["Einsum", "Gemm", "MatMul"])
"""What is multiplied by something made of the image is a weight, on either side."""


def image_input(path: Path, graph: onnx.GraphProto, stored: Stored) -> onnx.ValueInfoProto:
    """The first input of rank 4, preferring one whose batch axis is open: weights are closed.

    Raises:
        ModelFileError: there is none.
        UnsupportedModelError: there are several with an open batch axis.
    """
    candidates: list[onnx.ValueInfoProto] = [
        value
        for value in graph.input
        if value.type.tensor_type.elem_type in (*FLOATS, onnx.TensorProto.UINT8)
        and len(value.type.tensor_type.shape.dim) == 4
        and value.name not in stored.weights
        and value.name not in stored.constants
    ]
    if not candidates:
        raise ModelFileError(
            f"{path} has no image-like input; one of four axes (batch, channels, height, width) "
            "is needed"
        )
    dynamic = [candidate for candidate in candidates if image_shape(candidate)[0] is None]
    if len(dynamic) > 1:
        names = ", ".join(value.name for value in dynamic)
        raise UnsupportedModelError(f"{path} has several image inputs ({names}); one is supported")
    return (dynamic or candidates)[0]


def image_shape(value: onnx.ValueInfoProto) -> tuple[int | None, ...]:
    """Its sizes; None where the file leaves one open."""
    axes = value.type.tensor_type.shape.dim
    return tuple(axis.dim_value if axis.dim_value > 0 else None for axis in axes)


def supplied_weights(
    path: Path, values: Sequence[onnx.ValueInfoProto], image: str
) -> dict[str, Kind]:
    """Type and shape of inputs beside the image that nothing is stored for.

    Raises:
        UnsupportedModelError: one has no fixed shape, so it is none.
        ModelFileError: one is larger than any weight.
    """
    supplied = {}
    for value in values:
        kind = value.type.tensor_type
        shape = tuple(axis.dim_value for axis in kind.shape.dim)
        if not kind.HasField("shape") or min(shape, default=1) < 1:
            raise UnsupportedModelError(
                f"{path}: input {value.name!r} beside the image {image!r} has no fixed shape; "
                "models of one image input are supported"
            )
        check_size(path, value.name, shape)
        supplied[value.name] = kind.elem_type, shape
    return supplied


def refuse_what_is_no_weight(
    path: Path,
    operations: Sequence[Operation],
    image: onnx.ValueInfoProto,
    supplied: Mapping[str, Kind],
    stored: Collection[str],
) -> None:
    """Looks at how inputs beside the image are used.

    A file that leaves its weights out may add or scale by some of them too (position tables, layer
    scale); so one that no weight slot takes is still a weight if others are, and all slots whose
    weights are known are filled by inputs.

    Args:
        supplied: the inputs beside the image that nothing is stored for.
        stored: names of the weights that the file does store.

    Raises:
        UnsupportedModelError: one is no weight; it is named.
    """
    in_slots = _in_weight_slots(operations, image.name)
    left_out = not supplied.keys().isdisjoint(in_slots) and in_slots.isdisjoint(stored)
    used = {name for operation in operations for name in operation.inputs}
    images = image_shape(image)
    for name, (_, shape) in supplied.items():
        second = len(shape) == 4 and (shape[0], *shape[2:]) == (images[0], *images[2:])
        if name in used and (second or not (left_out or name in in_slots)):
            raise UnsupportedModelError(
                f"{path}: input {name!r} of shape {list(shape)} beside the image {image.name!r} "
                "is not a weight; models of one image input are supported"
            )


def _in_weight_slots(operations: Iterable[Operation], image: str) -> set[str]:
    """Names of all that weights in their places are made of, themselves included."""
    depends = {image}  # on the pixels
    folded: dict[str, Operation] = {}  # by output
    names: list[str] = []
    for operation in operations:
        inputs, operator = operation.inputs, operation.operator
        if operator not in ("Shape", "Size") and not depends.isdisjoint(inputs):
            depends.update(filter(None, operation.outputs))
            if operator in _PRODUCTS:
                names.extend(inputs)
        else:
            folded.update((name, operation) for name in operation.outputs if name)
        names.extend(inputs[slot] for slot in _WEIGHT_SLOTS.get(operator, ()) if slot < len(inputs))
    weights: set[str] = set()
    while names:
        name = names.pop()
        if name and name not in depends and name not in weights:
            weights.add(name)
            if name in folded:
                names.extend(folded[name].inputs)
    return weights


_SETTINGS = {"Clip": (1, 2), "Dropout": (1,), "OneHot": (2,), "Pad": (2,), "Resize": (1, 2)}
"""Places among a node's inputs where numbers say how it computes."""


def not_trained(operations: Iterable[Operation]) -> set[str]:
    """Of what is stored as weights, running statistics and what stands only in places of settings.

    Running means and variances are updated, but not trained.
    """
    statistics: set[str] = set()
    settings: set[str] = set()
    others: set[str] = set()
    for operation in operations:
        if operation.operator == "BatchNormalization":
            statistics.update(operation.inputs[3:5])
        places = _SETTINGS.get(operation.operator, ())
        for place, name in enumerate(operation.inputs):
            (settings if place in places else others).add(name)
    return statistics | (settings - others)
