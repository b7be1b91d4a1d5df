"""Nodes as a forward pass runs, and the Graph made of them: MACs, memory, signatures.

Properties of operators are in `operators.csv` (ONNX) and `aten.csv` (PyTorch).
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.records import SHAPE_LENGTH, Graph, IntArray


class OnnxRow(NamedTuple):
    """Properties of one operator of ONNX."""

    operator: str
    is_feature: bool
    kind: str
    passes: int
    is_commutative: bool


class AtenRow(NamedTuple):
    """Properties of one operator of PyTorch."""

    operator: str
    rule: str
    kernel: str


def _rows(name: str) -> Iterator[dict[str, str]]:
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


ONNX: Mapping[str, OnnxRow] = {
    row["operator"]: OnnxRow(
        operator=row["operator"],
        is_feature=row["feature"] == "yes",
        kind=row["class"],
        passes=int(row["passes"]),
        is_commutative=row["commutative"] == "yes",
    )
    for row in _rows("operators.csv")
}
ATEN: Mapping[str, AtenRow] = {row["operator"]: AtenRow(**row) for row in _rows("aten.csv")}


def operators_of(*kinds: str) -> frozenset[str]:
    """Return the ONNX operators of these classes."""
    return frozenset(row.operator for row in ONNX.values() if row.kind in kinds)


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

    The axis of a softmax or the order of a subtraction changes no shape. Axes count from the front,
    and numbers are rounded as in fp32.

    Args:
        operator: ONNX operator.
        attributes: Attributes as Python values.
        inputs: Shapes of all inputs with weights; () for a missing one.
        sources: Sources of the same inputs; None for weights, constants and missing ones.
        image_type: Element type of the image, such as `float32`.

    Raises:
        TypeError, ValueError: Attributes that do not fit the operator.
    """
    rank = max(len(inputs[0]), 1) if inputs else 1
    words = []
    for name, value in sorted(attributes.items()):
        from_front = value
        if name == "axis":
            from_front = value % rank
        elif name == "axes":
            from_front = sorted(axis % rank for axis in value or range(rank))
        words.append(f"{name}={_plain(from_front)}")
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
    shapes = (
        [_pad_sizes(node.inputs[0]) for node in nodes],
        [_pad_sizes(n.outputs[0]) for n in nodes],
    )
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


def _pad_sizes(shape: Shape) -> Shape:
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


@dataclass(frozen=True)
class Value:
    """Origin and shape of a tensor."""

    shape: Shape
    producer: int | None = None
    """Number of its node; None for images and what is folded away."""
    output: int = 0
    """Output of that node."""
    depends: bool = False
    weights: frozenset[int] = frozenset()
    """Identities of the parameters in a folded tensor."""
    drops: bool = False
    """True if it is 0 for the samples that training drops, which inference does not."""

    def of_shape(self, shape: Shape) -> Value:
        return dataclasses.replace(self, shape=shape)


class GraphBuilder:
    """Collects nodes in the order in which they run."""

    def __init__(self, parameter_sizes: Mapping[int, int]) -> None:
        self._sizes = parameter_sizes
        self._nodes: list[tuple[Node, list[Value]]] = []

    def emit(
        self, operator: str, inputs: Sequence[Value], *shapes: Shape, **attributes: Any
    ) -> list[Value]:
        """Add a node and return its outputs; a node that does not depend on images is folded."""
        if not any(value.depends for value in inputs):
            weights = frozenset[int]().union(*(value.weights for value in inputs))
            return [Value(shape, weights=weights) for shape in shapes]
        node = Node(operator, [v.shape for v in inputs], shapes, attributes=attributes)
        self._nodes.append((node, list(inputs)))
        node_number = len(self._nodes) - 1
        return [Value(shape, node_number, i, depends=True) for i, shape in enumerate(shapes)]

    def before(self, value: Value, operator: str) -> tuple[Value, Node] | None:
        """Return the first input and the node of a value, if the node has this operator."""
        if value.producer is None or self._nodes[value.producer][0].operator != operator:
            return None
        node, inputs = self._nodes[value.producer]
        return inputs[0], node

    def graph(self, outputs: Sequence[Value], batch_size: int, image_type: str) -> Graph:
        """Return the nodes that these outputs need; a parameter counts at its first user."""
        alive = {value.producer for value in outputs}
        for number in reversed(range(len(self._nodes))):
            if number in alive:
                alive |= {value.producer for value in self._nodes[number][1]}
        kept = [number for number in range(len(self._nodes)) if number in alive]
        place = {number: i for i, number in enumerate(kept)}
        counted: set[int] = set()
        nodes = []
        for number in kept:
            node, inputs = self._nodes[number]
            weights = frozenset[int]().union(*(value.weights for value in inputs)) - counted
            counted |= weights
            sources = [_source(value, place) for value in inputs]
            parameters = sum(self._sizes[key] for key in weights)
            nodes.append(node._replace(parameters=parameters, sources=sources))
        return assemble(nodes, image_type, batch_size)


def _source(value: Value, place: Mapping[int, int]) -> Source | None:
    if value.producer is not None:
        return Source(place[value.producer], value.output)
    return Source(IMAGE) if value.depends else None


@cache
def _arguments(func: Any) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    arguments = func._schema.arguments
    return tuple(a.name for a in arguments), {a.name: a.default_value for a in arguments}


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the operator's schema, with defaults."""
    names, defaults = _arguments(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


class Call:
    """One call of a PyTorch operator."""

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[torch.Tensor],
        value: Callable[[torch.Tensor], Value],
        builder: GraphBuilder,
    ) -> None:
        self._value = value
        self.builder = builder
        self.outputs = outputs
        self.arguments = bound(func, args, kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def value(self, name: str) -> Value | None:
        """Return the tensor of this name, or None if it is missing or a number."""
        tensor = self.arguments.get(name)
        return self._value(tensor) if isinstance(tensor, torch.Tensor) else None

    def values(self, *names: str) -> list[Value]:
        """Return the tensors among these arguments, in order."""
        return [value for value in map(self.value, names) if value is not None]

    def sequence(self, name: str) -> list[Value]:
        return [self._value(t) for t in self.arguments[name] if t is not None]

    def tensors(self) -> list[Value]:
        """Return all tensors among the arguments, in order."""
        values = []
        for argument in self.arguments.values():
            items = argument if isinstance(argument, (list, tuple)) else [argument]
            values += [self._value(t) for t in items if isinstance(t, torch.Tensor)]
        return values

    @property
    def input(self) -> Value:
        """The first tensor."""
        return self.tensors()[0]

    @property
    def shapes(self) -> list[Shape]:
        return [tuple(t.shape) for t in self.outputs]

    def emit(self, operator: str, *inputs: Value, shape: Shape | None = None, **more: Any) -> Value:
        """Return the output of a new node, by default with the shape of the call's first result."""
        return self.builder.emit(
            operator, inputs, self.shapes[0] if shape is None else shape, **more
        )[0]
