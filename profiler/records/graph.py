"""The computation graph of an architecture as arrays, at one batch size and at all."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.files import pack, unpack

# As in the test of isomorphism by Weisfeiler and Lehman (1968), a node's hash takes in those of
# its neighbours. In an acyclic graph one pass down and one pass up do what their rounds do: they
# let each node know all that it is computed from and all that is computed from it.


def graph_hash(
    operators: Sequence[str],
    edges: npt.NDArray[np.int64],
    content: npt.NDArray[np.int64],
    salt: str = "",
    signatures: Sequence[str] = (),
    edge_slots: Sequence[str] = (),
) -> str:
    """Return 64 hexadecimal digits that are equal for equal graphs in any topological order.

    Args:
        operators, edges: As in `Graph`.
        content: Further numbers of each node (N, any).
        salt, signatures, edge_slots: Further texts of the graph, of each node and of each edge.

    Raises:
        TrappmError: The nodes are not in topological order.
    """
    if np.any(edges[:, 0] >= edges[:, 1]):
        raise TrappmError("the nodes of a graph must be in topological order to be hashed")
    rows = np.ascontiguousarray(content, dtype="<i8")
    own = [
        _digest([operator.encode(), row.tobytes()])
        for operator, row in zip(operators, rows, strict=True)
    ]
    if signatures:
        own = [_digest([known, text.encode()]) for known, text in zip(own, signatures, strict=True)]
    slots = [text.encode() for text in edge_slots] or [b""] * len(edges)
    pairs = list(zip(edges.tolist(), slots, strict=True))
    producers: list[list[tuple[bytes, int]]] = [[] for _ in own]
    consumers: list[list[tuple[bytes, int]]] = [[] for _ in own]
    for (source, target), slot in pairs:
        producers[target].append((slot, source))
        consumers[source].append((slot, target))
    down, up = own.copy(), own.copy()
    for node in range(len(own)):
        down[node] = _digest([own[node], *sorted(slot + down[i] for slot, i in producers[node])])
    for node in reversed(range(len(own))):
        up[node] = _digest([own[node], *sorted(slot + up[i] for slot, i in consumers[node])])
    known = [_digest(pair) for pair in zip(down, up, strict=True)]
    links = [_digest([known[source], slot + known[target]]) for (source, target), slot in pairs]
    return _digest([salt.encode(), *sorted(known), b"", *sorted(links)]).hex()


def _digest(parts: Iterable[bytes]) -> bytes:
    sized = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    return hashlib.sha256(b"".join(sized)).digest()


IntArray = npt.NDArray[np.int64]

SHAPE_LENGTH = 6
"""Length of shapes, padded with zeros as in the paper's node features."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The computation graph of a configuration with N nodes and E edges, at its batch size."""

    operators: tuple[str, ...]
    """ONNX operator of each node, in topological order (N)."""
    edges: IntArray
    """Producer and consumer of each edge (E, 2)."""
    input_shapes: IntArray
    """Shape of each node's first input, padded with zeros (N, 6)."""
    output_shapes: IntArray
    """Shape of each node's first output, padded with zeros (N, 6)."""
    macs: IntArray
    """Multiply-accumulate operations of each node's forward pass (N)."""
    parameters: IntArray
    """Number of weights of each node (N); shared weights count at the first."""
    memory_bytes: IntArray
    """Bytes of each node's outputs and weights in fp32 (N)."""
    batch_size: int
    signatures: tuple[str, ...] = ()
    """Further properties of each node (N), by `node_signature`."""
    edge_slots: tuple[str, ...] = ()
    """Outputs and inputs that each edge connects (E)."""

    @classmethod
    def empty(cls, batch_size: int) -> Self:
        """Return a graph without nodes, for predictors that use only the batch size."""
        none, shapes = np.zeros(0, dtype=np.int64), np.zeros((0, 6), dtype=np.int64)
        return cls(
            operators=(),
            edges=np.zeros((0, 2), dtype=np.int64),
            input_shapes=shapes,
            output_shapes=shapes,
            macs=none,
            parameters=none,
            memory_bytes=none,
            batch_size=batch_size,
        )

    @property
    def node_count(self) -> int:
        return len(self.operators)

    @property
    def edge_count(self) -> int:
        return int(self.edges.shape[0])


_STRUCTURE = ("operators", "edge_slots")
_SCALED = ("input_shapes", "output_shapes", "macs", "memory_bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphTemplate:
    """The graph of an architecture at one input size, for every batch size.

    Every size is affine in the batch size (`constant + slope * batch_size`). A model for a single
    batch size has `fixed_batch_size` and slopes of zero.
    """

    operators: tuple[str, ...]
    edges: IntArray
    constant: Mapping[str, IntArray]
    """Constant part of input_shapes, output_shapes, macs and memory_bytes."""
    slope: Mapping[str, IntArray]
    """Increase per sample of the same four."""
    parameters: IntArray
    fixed_batch_size: int | None = None
    signatures: tuple[str, ...] = ()
    edge_slots: tuple[str, ...] = ()

    def at(self, batch_size: int) -> Graph:
        """Return the graph at this batch size.

        Raises:
            InputError: The batch size is below 1, or not the fixed one of the model.
        """
        if batch_size < 1:
            raise InputError(f"batch size is {batch_size}; it must be 1 or more")
        if self.fixed_batch_size is not None and batch_size != self.fixed_batch_size:
            raise InputError(
                f"the model's batch size is fixed at {self.fixed_batch_size}, not {batch_size}; "
                "export it with a dynamic batch axis to ask for other batch sizes"
            )
        sizes = {name: self.constant[name] + self.slope[name] * batch_size for name in _SCALED}
        return Graph(
            operators=self.operators,
            edges=self.edges,
            parameters=self.parameters,
            batch_size=batch_size,
            signatures=self.signatures,
            edge_slots=self.edge_slots,
            **sizes,
        )

    @classmethod
    def from_graphs(cls, first: Graph, second: Graph, third: Graph | None = None) -> Self:
        """Return the template of graphs at two batch sizes, checked at an optional third.

        Raises:
            TrappmError: They differ in structure, or are not affine in the batch size.
        """
        signatures = _common_signatures(first, second)
        step = second.batch_size - first.batch_size
        slope, constant = {}, {}
        for name in _SCALED:
            difference = getattr(second, name) - getattr(first, name)
            if np.any(difference % step):
                raise TrappmError(
                    f"{name} is not affine in the batch size; it mixes the samples of a batch"
                )
            slope[name] = difference // step
            constant[name] = getattr(first, name) - slope[name] * first.batch_size
        template = replace(
            cls.fixed(first),
            constant=constant,
            slope=slope,
            fixed_batch_size=None,
            signatures=signatures,
        )
        if third is None:
            return template
        if _common_signatures(first, third) != signatures:
            raise TrappmError(_ANOTHER_STRUCTURE)
        again = template.at(third.batch_size)
        for name in _SCALED:
            if not np.array_equal(getattr(again, name), getattr(third, name)):
                raise TrappmError(
                    f"{name} is not affine in the batch size; it mixes the samples of a batch"
                )
        return template

    @classmethod
    def fixed(cls, graph: Graph) -> Self:
        """Return a template for one batch size only."""
        return cls(
            operators=graph.operators,
            edges=graph.edges,
            constant={name: getattr(graph, name) for name in _SCALED},
            slope={name: np.zeros_like(getattr(graph, name)) for name in _SCALED},
            parameters=graph.parameters,
            fixed_batch_size=graph.batch_size,
            signatures=graph.signatures,
            edge_slots=graph.edge_slots,
        )

    def to_bytes(self) -> bytes:
        """Return a compressed NumPy archive without pickled objects."""
        arrays: dict[str, npt.NDArray[Any]] = {
            **_packed("vocabulary", "operators", self.operators),
            **_packed("signature_texts", "signatures", self.signatures),
            **_packed("slot_texts", "edge_slots", self.edge_slots),
            "edges": self.edges,
            "parameters": self.parameters,
            "fixed_batch_size": np.array(self.fixed_batch_size or 0),
        }
        arrays |= {f"constant.{name}": self.constant[name] for name in _SCALED}
        arrays |= {f"slope.{name}": self.slope[name] for name in _SCALED}
        return pack(arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        arrays = unpack(data)
        return cls(
            operators=_unpacked(arrays, "vocabulary", "operators"),
            signatures=_unpacked(arrays, "signature_texts", "signatures"),
            edge_slots=_unpacked(arrays, "slot_texts", "edge_slots"),
            edges=arrays["edges"],
            constant={name: arrays[f"constant.{name}"] for name in _SCALED},
            slope={name: arrays[f"slope.{name}"] for name in _SCALED},
            parameters=arrays["parameters"],
            fixed_batch_size=int(arrays["fixed_batch_size"]) or None,
        )

    @property
    def content_hash(self) -> str:
        """64 hexadecimal digits, equal for graphs of one structure in any order of nodes."""
        columns = [part[name] for part in (self.constant, self.slope) for name in _SCALED]
        return graph_hash(
            self.operators,
            self.edges,
            np.column_stack([*columns, self.parameters]).astype(np.int64),
            salt=f"fixed batch size {self.fixed_batch_size}",
            signatures=self.signatures,
            edge_slots=self.edge_slots,
        )


_ANOTHER_STRUCTURE = "the graph's structure changes with the batch size"
_NUMBER = re.compile(r"(\d+)")


def _common_signatures(first: Graph, second: Graph) -> tuple[str, ...]:
    """Return the signatures of graphs of one structure at two batch sizes.

    A number that grows with the batch, as the groups of a convolution with weights for each sample
    (CondConv), becomes a line: `group=0+1n`.

    Raises:
        TrappmError: They differ in structure.
    """
    same = all(getattr(first, name) == getattr(second, name) for name in _STRUCTURE)
    if not same or not np.array_equal(first.edges, second.edges):
        raise TrappmError(_ANOTHER_STRUCTURE)
    batch_sizes = first.batch_size, second.batch_size
    return tuple(
        text if text == other else _affine_text(text, other, batch_sizes)
        for text, other in zip(first.signatures, second.signatures, strict=True)
    )


def _affine_text(first: str, second: str, batch_sizes: tuple[int, int]) -> str:
    parts = []
    words, others = _NUMBER.split(first), _NUMBER.split(second)
    if len(words) != len(others):
        raise TrappmError(_ANOTHER_STRUCTURE)
    for word, other in zip(words, others, strict=True):
        if word == other:
            parts.append(word)
            continue
        if not (word.isdecimal() and other.isdecimal()):
            raise TrappmError(_ANOTHER_STRUCTURE)
        slope, rest = divmod(int(other) - int(word), batch_sizes[1] - batch_sizes[0])
        if rest:
            raise TrappmError(_ANOTHER_STRUCTURE)
        parts.append(f"{int(word) - slope * batch_sizes[0]}+{slope}n")
    return "".join(parts)


def _packed(texts: str, places: str, values: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the distinct texts, and the index of each value."""
    once = sorted(set(values))
    place = {text: i for i, text in enumerate(once)}
    return {
        texts: np.array(once, dtype=np.str_),
        places: np.array([place[value] for value in values], dtype=np.int32),
    }


def _unpacked(arrays: Mapping[str, Any], texts: str, places: str) -> tuple[str, ...]:
    if texts not in arrays:
        return ()
    once = [str(text) for text in arrays[texts]]
    return tuple(once[i] for i in arrays[places])
