"""What a node does beyond its operator and shapes, as one short text, for the content hash.

A dilation that its padding hides, the axis of a softmax or which operand is subtracted change no
shape. The text has the attributes that both makers of graphs know, in one form: defaults filled in,
axes counted from the front, numbers as fp32 holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trappm.profiler.graphs.macs import Attributes, Shape


class Source(NamedTuple):
    """Where an input that depends on the image comes from."""

    node: int
    """Place among the nodes, or `IMAGE`."""
    output: int = 0
    """Of that node."""


IMAGE = -1

COMMUTATIVE = frozenset(
    ["Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Max", "Mean", "Min", "Mul",
     "Or", "Sum", "Xor"]
)  # fmt: skip
"""Operators of which `a, b` and `b, a` are one."""


def node_signature(
    operator: str,
    attributes: Attributes,
    inputs: Sequence[Shape],
    sources: Sequence[Source | None],
    image_type: str,
) -> str:
    """The text of one node.

    Args:
        operator: ONNX operator type.
        attributes: as Python values.
        inputs: shapes of all inputs, weights included; () for one left out.
        sources: of the same inputs; None for weights, constants and what is left out.
        image_type: element type of the image, such as `float32`.

    Raises:
        IndexError, KeyError, TypeError, ValueError: attributes that do not fit the operator.
    """
    names = _COUNTED.get(operator)
    if names is None:
        pairs = sorted((name, _plain(value)) for name, value in attributes.items())
    else:
        pairs = [(name, _FORMS[name](operator, attributes, inputs)) for name in names]
    words = [f"{name}={value}" for name, value in pairs]
    if any(source is not None and source.node == IMAGE for source in sources):
        words.append(f"image={image_type}")
    return " ".join([*words, _pattern(operator, sources)]).strip()


def _pattern(operator: str, sources: Sequence[Source | None]) -> str:
    """A letter for each input: image, node or constant; constants at the end are left out."""
    letters = ["c" if s is None else "i" if s.node == IMAGE else "n" for s in sources]
    if operator in COMMUTATIVE:
        letters = sorted(letter for letter in letters if letter != "c")
    return "".join(letters).rstrip("c")


def edge_slots(
    operators: Sequence[str], sources: Iterable[Sequence[Source | None]]
) -> dict[tuple[int, int], str]:
    """For each edge, which outputs of its producer are which inputs of its consumer: `0>1 0>2`."""
    slots: dict[tuple[int, int], list[str]] = {}
    for node, (operator, given) in enumerate(zip(operators, sources, strict=True)):
        for place, source in enumerate(given):
            if source is not None and source.node != IMAGE:
                slot = 0 if operator in COMMUTATIVE else place
                slots.setdefault((source.node, node), []).append(f"{source.output}>{slot}")
    return {edge: " ".join(sorted(texts)) for edge, texts in slots.items()}


def _plain(value: Any) -> str:
    """Numbers, texts and lists of them; anything else (a tensor) by its type alone."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_plain, value))
    if isinstance(value, float):
        return f"{np.float32(value):.6g}"
    return str(value) if isinstance(value, (int, str)) else type(value).__name__


_Form = Callable[[str, Attributes, Sequence[Shape]], str]


def _number(name: str, default: float = 0.0, **defaults: float) -> _Form:
    """A number; its default may hang on the operator."""

    def form(operator: str, attributes: Attributes, _: Sequence[Shape]) -> str:
        return _plain(float(attributes.get(name, defaults.get(operator, default))))

    return form


def _text(name: str, default: str) -> _Form:
    def form(operator: str, attributes: Attributes, _: Sequence[Shape]) -> str:
        return _plain(attributes.get(name, default))

    return form


def _axis(operator: str, attributes: Attributes, inputs: Sequence[Shape]) -> str:
    default = 0 if operator in ("ArgMax", "ArgMin", "Gather", "GatherElements", "Split") else -1
    return str(attributes.get("axis", default) % max(len(inputs[0]), 1))


def _axes(_: str, attributes: Attributes, inputs: Sequence[Shape]) -> str:
    rank = len(inputs[0])
    return _plain(sorted(axis % rank for axis in attributes.get("axes") or range(rank)))


def _perm(_: str, attributes: Attributes, inputs: Sequence[Shape]) -> str:
    return _plain(attributes.get("perm") or range(len(inputs[0]))[::-1])


def _kernel(attributes: Attributes, inputs: Sequence[Shape]) -> Sequence[int]:
    """Given, or that of the weight."""
    return attributes.get("kernel_shape") or inputs[1][2:]


def _kernel_shape(_: str, attributes: Attributes, inputs: Sequence[Shape]) -> str:
    return _plain(list(_kernel(attributes, inputs)))


def _per_axis(name: str, default: int) -> _Form:
    def form(_: str, attributes: Attributes, inputs: Sequence[Shape]) -> str:
        return _plain(attributes.get(name) or [default] * len(_kernel(attributes, inputs)))

    return form


def _pads(operator: str, attributes: Attributes, inputs: Sequence[Shape]) -> str:
    """Before all axes, then after them; `auto_pad` is worked out as ONNX says it."""
    kernel = _kernel(attributes, inputs)
    auto = attributes.get("auto_pad", "NOTSET")
    if auto == "NOTSET":
        return _plain(attributes.get("pads") or [0] * 2 * len(kernel))
    if auto == "VALID":
        return _plain([0] * 2 * len(kernel))
    if operator == "ConvTranspose":
        return str(auto)
    before, after = [], []
    strides = attributes.get("strides") or [1] * len(kernel)
    dilations = attributes.get("dilations") or [1] * len(kernel)
    for size, window, stride, dilation in zip(
        inputs[0][2:], kernel, strides, dilations, strict=True
    ):
        covered = (-(-size // stride) - 1) * stride + (window - 1) * dilation + 1
        total = max(covered - size, 0)
        less, more = total // 2, total - total // 2
        before.append(less if auto == "SAME_UPPER" else more)
        after.append(more if auto == "SAME_UPPER" else less)
    return _plain(before + after)


def _count_include_pad(operator: str, attributes: Attributes, inputs: Sequence[Shape]) -> str:
    """Of no consequence without padding."""
    padded = set(_pads(operator, attributes, inputs).split(",")) != {"0"}
    return str(int(padded and attributes.get("count_include_pad", 0)))


def _equation(_: str, attributes: Attributes, __: Sequence[Shape]) -> str:
    """Labels renamed in the order in which they come."""
    text = attributes["equation"].replace(" ", "")
    labels = list(dict.fromkeys(letter for letter in text if letter.isalpha()))
    return "".join(str(labels.index(c)) + ";" if c.isalpha() else c for c in text)


_FORMS: Mapping[str, _Form] = {
    "alpha": _number("alpha", 1.0, LeakyRelu=0.01, HardSigmoid=0.2),
    "axes": _axes,
    "axis": _axis,
    "beta": _number("beta", 1.0, HardSigmoid=0.5),
    "count_include_pad": _count_include_pad,
    "dilations": _per_axis("dilations", 1),
    "direction": _text("direction", "forward"),
    "epsilon": _number("epsilon", 1e-5),
    "equation": _equation,
    "group": _number("group", 1),
    "kernel_shape": _kernel_shape,
    "mode": _text("mode", "constant"),
    "output_padding": _per_axis("output_padding", 0),
    "pads": _pads,
    "perm": _perm,
    "strides": _per_axis("strides", 1),
    "to": _number("to"),
    "transA": _number("transA"),
    "transB": _number("transB"),
}

_SHAPES_TELL = (
    "Celu", "Col2Im", "CumSum", "DepthToSpace", "Dropout", "Expand", "Flatten", "GatherND",
    "GridSample", "Mod", "Reshape", "Resize", "ScatterElements", "ScatterND", "Selu", "Slice",
    "SpaceToDepth",
    "Squeeze", "ThresholdedRelu", "Tile", "TopK", "Trilu", "Unsqueeze",
)  # fmt: skip
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

_COUNTED: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_SHAPES_TELL, ()),
    **{f"Reduce{name}": ("axes",) for name in _REDUCTIONS},
    **dict.fromkeys(
        ["ArgMax", "ArgMin", "Concat", "Gather", "GatherElements", "LogSoftmax", "Softmax",
         "Split"],
        ("axis",),
    ),
    "AveragePool": ("count_include_pad", "kernel_shape", "pads", "strides"),
    "BatchNormalization": ("epsilon",),
    "Cast": ("to",),
    "Conv": ("dilations", "group", "kernel_shape", "pads", "strides"),
    "ConvTranspose": (
        "dilations", "group", "kernel_shape", "output_padding", "pads", "strides",
    ),
    "Einsum": ("equation",),
    "Elu": ("alpha",),
    "Gemm": ("alpha", "beta", "transA", "transB"),
    "HardSigmoid": ("alpha", "beta"),
    "InstanceNormalization": ("epsilon",),
    "LSTM": ("direction",),
    "LayerNormalization": ("axis", "epsilon"),
    "LeakyRelu": ("alpha",),
    "MaxPool": ("dilations", "kernel_shape", "pads", "strides"),
    "Pad": ("mode",),
    "Transpose": ("perm",),
}  # fmt: skip
"""What counts of operators that a module's trace emits; of all others every attribute counts."""
