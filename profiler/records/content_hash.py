"""A hash of a graph's structure that does not depend on the names or the order of its nodes.

As in the test of isomorphism by Weisfeiler and Lehman (1968), a node's hash takes in those of its
neighbours. In an acyclic graph one pass down and one pass up do what their rounds do: they let each
node know all that it is computed from and all that is computed from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from trappm.profiler.errors import TrappmError


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
