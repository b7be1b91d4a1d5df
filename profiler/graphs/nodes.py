"""Nodes and the Graph made of them: MACs, memory, signatures, padded shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.graphs.operator_table import ONNX, operators_of
from trappm.profiler.records import SHAPE_LENGTH, Graph, IntArray

# Linear algebra is counted exactly as FlopCounterMode counts it (half its flops; the addition of a
# bias is free). Everything else counts one MAC for each pass over an element that it computes, so
# that a model of many cheap operators does not look free; moving data counts nothing.

Shape = tuple[int, ...]
Attributes = Mapping[str, Any]
_Rule = Callable[[Attributes, Sequence[Shape], Sequence[Shape]], int]

MOVES = operators_of("move", "view")
"""Operators that move data and compute nothing (Dropout: as in inference)."""
VIEWS = operators_of("view", "constant")
"""Operators without a kernel in PyTorch."""
CONVOLUTIONS = operators_of("convolution")
PRODUCTS = operators_of("product")
"""Operators made of matrix products, except convolutions."""


def node_macs(
    operator: str, attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> int:
    """Return the MACs of one node.

    Args:
        operator: ONNX operator.
        attributes: Attributes as Python values.
        inputs: Shapes of all inputs with weights; () for a missing one.
        outputs: Shapes of all outputs.
    """
    if operator in MOVES or not outputs:
        return 0
    rule = _RULES.get(operator)
    if rule is not None:
        return rule(attributes, inputs, outputs)
    if operator.startswith(("Arg", "Global", "Reduce")):
        return math.prod(inputs[0])
    return math.prod(outputs[0]) * (ONNX[operator].passes if operator in ONNX else 1)


def _conv(_: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return math.prod(outputs[0]) * math.prod(inputs[1][1:])


def _conv_transpose(_: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _gemm(attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    inner: int = inputs[0][0] if attributes.get("transA", 0) else inputs[0][1]
    return math.prod(outputs[0]) * inner


def _matmul(_: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return math.prod(outputs[0]) * inputs[0][-1]


def _einsum(attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Return the product of all labels' extents, as of one loop nest (exact for two operands)."""
    terms = attributes["equation"].replace(" ", "").split("->")[0].split(",")
    extents: dict[str, int] = {}
    batch = 1
    for term, shape in zip(terms, inputs, strict=True):
        head, dots, tail = term.partition("...")
        spread = len(shape) - len(head) - len(tail) if dots else 0
        labelled = shape[: len(head)] + shape[len(head) + spread :]
        extents |= {
            c: max(n, extents.get(c, 1)) for c, n in zip(head + tail, labelled, strict=True)
        }
        batch = max(batch, math.prod(shape[len(head) : len(head) + spread]))
    return batch * math.prod(extents.values())


def _attention(attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Return the MACs of scores and weighted values, over all heads."""
    query, key, value = inputs[:3]
    if len(query) == 3:  # (batch, length, heads * size)
        batch, length, width = query
        heads: int = attributes.get("q_num_heads", 1)
        value_heads: int = attributes.get("kv_num_heads", heads)
        value_width = value[-1] // value_heads * heads
    else:  # (batch, heads, length, size)
        batch, heads, length, size = query
        width, value_width = heads * size, heads * value[-1]
    return batch * length * key[-2] * (width + value_width)


def _linear_attention(
    attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> int:
    """Return the MACs of a state of key by value, updated and read at each position.

    Each key head updates it and each query head reads it. Delta rules also read it for the update.
    """
    (batch, length, width), _, value = inputs[:3]
    heads: int = attributes["q_num_heads"]
    key_heads: int = attributes["kv_num_heads"]
    updates = 2 if "delta" in attributes.get("update_rule", "gated_delta") else 1
    state = width // heads * (value[-1] // key_heads)
    return batch * length * state * (heads + updates * key_heads)


def _recurrent(_: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Return the MACs of the weights for inputs and states at each time step of each sample."""
    return inputs[0][0] * inputs[0][1] * (math.prod(inputs[1]) + math.prod(inputs[2]))


def _pool(attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return math.prod(outputs[0]) * math.prod(attributes["kernel_shape"])


_RULES: Mapping[str, _Rule] = {
    "Attention": _attention,
    "AveragePool": _pool,
    "CausalConvWithState": _conv,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DeformConv": _conv,
    "Einsum": _einsum,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "LSTM": _recurrent,
    "LinearAttention": _linear_attention,
    "LpPool": _pool,
    "MatMul": _matmul,
    "MaxPool": _pool,
    "RNN": _recurrent,
}


class Source(NamedTuple):
    """Origin of an input that depends on the image."""

    node: int
    """Index of the node, or `IMAGE`."""
    output: int = 0
    """Output of that node."""


IMAGE = -1

COMMUTATIVE = frozenset(row.operator for row in ONNX.values() if row.is_commutative)
"""Operators for which `a, b` and `b, a` are the same."""


def node_signature(
    operator: str,
    attributes: Attributes,
    inputs: Sequence[Shape],
    sources: Sequence[Source | None],
    image_type: str,
) -> str:
    """Return what a node does beyond its operator and shapes, as text for the content hash.

    The axis of a softmax or the order of a subtraction changes no shape. The text has the
    attributes that both modules and files have, with defaults, axes from the front, and numbers in
    fp32.

    Args:
        operator: ONNX operator.
        attributes: Attributes as Python values.
        inputs: Shapes of all inputs with weights; () for a missing one.
        sources: Sources of the same inputs; None for weights, constants and missing ones.
        image_type: Element type of the image, such as `float32`.

    Raises:
        IndexError, KeyError, TypeError, ValueError: Attributes that do not fit the operator.
    """
    row = ONNX.get(operator)
    names = None if row is None else row.attributes
    if names is None:
        pairs = sorted((name, _plain(value)) for name, value in attributes.items())
    else:
        pairs = [(name, _FORMS[name](operator, attributes, inputs)) for name in names]
    words = [f"{name}={value}" for name, value in pairs]
    if any(source is not None and source.node == IMAGE for source in sources):
        words.append(f"image={image_type}")
    return " ".join([*words, _pattern(operator, sources)]).strip()


def _pattern(operator: str, sources: Sequence[Source | None]) -> str:
    """Return a letter for each input: image, node or constant, without constants at the end."""
    letters = ["c" if s is None else "i" if s.node == IMAGE else "n" for s in sources]
    if operator in COMMUTATIVE:
        letters = sorted(letter for letter in letters if letter != "c")
    return "".join(letters).rstrip("c")


def edge_slots(
    operators: Sequence[str], sources: Iterable[Sequence[Source | None]]
) -> dict[tuple[int, int], str]:
    """Return the outputs and inputs that each edge connects, such as `0>1 0>2`."""
    slots: dict[tuple[int, int], list[str]] = {}
    for node, (operator, given) in enumerate(zip(operators, sources, strict=True)):
        for place, source in enumerate(given):
            if source is not None and source.node != IMAGE:
                slot = 0 if operator in COMMUTATIVE else place
                slots.setdefault((source.node, node), []).append(f"{source.output}>{slot}")
    return {edge: " ".join(sorted(texts)) for edge, texts in slots.items()}


def _plain(value: Any) -> str:
    """Return numbers, texts and lists of them as text; for others the type."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_plain, value))
    if isinstance(value, float):
        return f"{np.float32(value):.6g}"
    return str(value) if isinstance(value, (int, str)) else type(value).__name__


_Form = Callable[[str, Attributes, Sequence[Shape]], str]


def _number(name: str, default: float = 0.0, **defaults: float) -> _Form:
    """Return the form of a number, whose default may depend on the operator."""

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
    """Return the kernel shape, by default that of the weight."""
    return attributes.get("kernel_shape") or inputs[1][2:]


def _kernel_shape(_: str, attributes: Attributes, inputs: Sequence[Shape]) -> str:
    return _plain(list(_kernel(attributes, inputs)))


def _per_axis(name: str, default: int) -> _Form:
    def form(_: str, attributes: Attributes, inputs: Sequence[Shape]) -> str:
        return _plain(attributes.get(name) or [default] * len(_kernel(attributes, inputs)))

    return form


def _pads(operator: str, attributes: Attributes, inputs: Sequence[Shape]) -> str:
    """Return padding before all axes, then after them, with `auto_pad` resolved."""
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
    """Return the attribute, which is irrelevant without padding."""
    padded = set(_pads(operator, attributes, inputs).split(",")) != {"0"}
    return str(int(padded and attributes.get("count_include_pad", 0)))


def _equation(_: str, attributes: Attributes, __: Sequence[Shape]) -> str:
    """Return the equation with labels renumbered in the order of their appearance."""
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

BYTES_PER_ELEMENT = 4


class Node(NamedTuple):
    """One operator with its shapes at one batch size."""

    operator: str
    inputs: Sequence[Shape]
    """Shapes of all inputs with weights; () for a missing one."""
    outputs: Sequence[Shape]
    parameters: int = 0
    attributes: Mapping[str, Any] = MappingProxyType({})
    sources: Sequence[Source | None] = ()
    """Sources of the inputs; None for weights, constants and missing ones."""


def assemble(nodes: Sequence[Node], image_type: str, batch_size: int) -> Graph:
    """Return the Graph of these nodes, which are in topological order.

    Args:
        nodes: Nodes with their shapes at this batch size.
        image_type: Element type of the image, such as `float32`.
        batch_size: Batch size of the shapes.

    Raises:
        UnsupportedModelError: Attributes or shapes that do not fit the operator, or sizes beyond 64
            bits.
    """
    operators = tuple(node.operator for node in nodes)
    slots = dict(sorted(edge_slots(operators, (node.sources for node in nodes)).items()))
    signatures = []
    macs, memory = [], []
    for node in nodes:
        given = node.operator, node.attributes, node.inputs
        try:
            signatures.append(node_signature(*given, node.sources, image_type))
            macs.append(node_macs(*given, node.outputs))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"cannot count {node.operator}, of these attributes and shapes: {error!r}"
            ) from error
        elements = node.parameters
        for shape in node.outputs:
            elements += math.prod(shape)
        memory.append(BYTES_PER_ELEMENT * elements)
    shapes = [_padded(node.inputs[0]) for node in nodes], [_padded(n.outputs[0]) for n in nodes]
    return Graph(
        operators=operators,
        signatures=tuple(signatures),
        edges=np.array(list(slots), dtype=np.int64).reshape(-1, 2),
        edge_slots=tuple(slots.values()),
        input_shapes=np.array(shapes[0], dtype=np.int64).reshape(-1, SHAPE_LENGTH),
        output_shapes=np.array(shapes[1], dtype=np.int64).reshape(-1, SHAPE_LENGTH),
        macs=_exact(macs),
        parameters=np.array([node.parameters for node in nodes], dtype=np.int64),
        memory_bytes=_exact(memory),
        batch_size=batch_size,
    )


def _padded(shape: Shape) -> Shape:
    """Return six sizes; the product of all axes from the sixth on is the last."""
    if len(shape) > SHAPE_LENGTH:
        shape = (*shape[: SHAPE_LENGTH - 1], math.prod(shape[SHAPE_LENGTH - 1 :]))
    return shape + _PADDING[len(shape)]


_PADDING = [(0,) * (SHAPE_LENGTH - rank) for rank in range(SHAPE_LENGTH + 1)]


def _exact(values: list[int]) -> IntArray:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise UnsupportedModelError("a node would need more than 2^63 operations") from error
