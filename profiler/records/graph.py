"""The computation graph of an architecture, as plain arrays: at one batch size, and at every one.

Taken from `profiler.records` by the other rooms.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trappm.profiler.errors import InputError, TrappmError

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
    """64 hexadecimal digits.

    Args:
        operators: of the nodes, in topological order (N).
        edges: producer and consumer (E, 2).
        content: whatever else belongs to each node (N, any).
        salt: whatever else belongs to the whole.
        signatures: of the nodes, or none.
        edge_slots: of the edges, or none.

    Raises:
        TrappmError: the nodes are not in topological order.
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
"""Tensor shapes are padded with zeros to this length, as in the paper's node features."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The computation graph of a configuration: N nodes, E edges, with sizes at its batch size."""

    operators: tuple[str, ...]
    """ONNX operator type of each node, in topological order (N)."""
    edges: IntArray
    """Producer and consumer of every edge (E, 2)."""
    input_shapes: IntArray
    """Shape of each node's first input, padded with zeros (N, 6)."""
    output_shapes: IntArray
    """Shape of each node's first output, padded with zeros (N, 6)."""
    macs: IntArray
    """Multiply-accumulate operations of each node's forward pass (N)."""
    parameters: IntArray
    """Number of weights of each node (N); a weight that two nodes share counts at the first."""
    memory_bytes: IntArray
    """Bytes of each node's outputs and weights in fp32 (N)."""
    batch_size: int
    signatures: tuple[str, ...] = ()
    """What each node does beyond operator and shapes (N), as `node_signature` writes it;
    empty in a graph stored before there were any."""
    edge_slots: tuple[str, ...] = ()
    """Of each edge, which outputs are which inputs (E); empty as the signatures."""

    @classmethod
    def empty(cls, batch_size: int) -> Self:
        """No node: for predictors that ask a graph for its batch size only."""
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

    Every size in it is affine in the batch size (`constant + slope * batch_size`), which whoever
    builds one has checked at a third batch size. A model whose batch size is baked in has
    `fixed_batch_size` and slopes of zero.
    """

    operators: tuple[str, ...]
    edges: IntArray
    constant: Mapping[str, IntArray]
    """The part that does not grow, for input_shapes, output_shapes, macs and memory_bytes."""
    slope: Mapping[str, IntArray]
    """What each further sample adds, for the same four."""
    parameters: IntArray
    fixed_batch_size: int | None = None
    signatures: tuple[str, ...] = ()
    edge_slots: tuple[str, ...] = ()

    def at(self, batch_size: int) -> Graph:
        """The graph at this batch size.

        Raises:
            InputError: the batch size is below 1, or the model only has another, fixed one.
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
        """The template through two graphs of one model, verified on a third if there is one.

        Raises:
            TrappmError: they are not of one structure, or not affine in the batch size.
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
        template = cls(
            operators=first.operators,
            edges=first.edges,
            constant=constant,
            slope=slope,
            parameters=first.parameters,
            signatures=signatures,
            edge_slots=first.edge_slots,
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
        """A template that knows one batch size only."""
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
        """A compressed NumPy archive without pickled objects."""
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
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # NumPy stub: allow_pickle
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
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
        """64 hexadecimal digits, equal for graphs of one structure in whatever order of nodes.

        A template stored without signatures keeps the hash that it was stored under, which no
        graph with signatures has.
        """
        version = "signatures 1, " if self.signatures else ""
        columns = [part[name] for part in (self.constant, self.slope) for name in _SCALED]
        return graph_hash(
            self.operators,
            self.edges,
            np.column_stack([*columns, self.parameters]).astype(np.int64),
            salt=f"{version}fixed batch size {self.fixed_batch_size}",
            signatures=self.signatures,
            edge_slots=self.edge_slots,
        )


_ANOTHER_STRUCTURE = "the graph's structure changes with the batch size"
_NUMBER = re.compile(r"(\d+)")


def _common_signatures(first: Graph, second: Graph) -> tuple[str, ...]:
    """The signatures of two graphs of one structure at two batch sizes.

    A number that grows with the batch, as the groups of a convolution that has weights of their own
    for each sample (CondConv), stands as a line over it: `group=0+1n`.

    Raises:
        TrappmError: they are not of one structure.
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
    """Each text once, and the place of each value among them."""
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
