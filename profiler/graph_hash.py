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

from profiler.errors import TrappmError


def graph_hash(
    operators: Sequence[str],
    edges: npt.NDArray[np.int64],
    content: npt.NDArray[np.int64],
    salt: str = "",
) -> str:
    """64 hexadecimal digits.

    Args:
        operators: of the nodes, in topological order (N).
        edges: producer and consumer (E, 2).
        content: whatever else belongs to each node (N, any).
        salt: whatever else belongs to the whole.

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
    producers: list[list[int]] = [[] for _ in own]
    consumers: list[list[int]] = [[] for _ in own]
    for source, target in edges.tolist():
        producers[target].append(source)
        consumers[source].append(target)
    down, up = own.copy(), own.copy()
    for node in range(len(own)):
        down[node] = _digest([own[node], *sorted(down[i] for i in producers[node])])
    for node in reversed(range(len(own))):
        up[node] = _digest([own[node], *sorted(up[i] for i in consumers[node])])
    known = [_digest(pair) for pair in zip(down, up, strict=True)]
    links = [_digest([known[source], known[target]]) for source, target in edges.tolist()]
    return _digest([salt.encode(), *sorted(known), b"", *sorted(links)]).hex()


def _digest(parts: Iterable[bytes]) -> bytes:
    sized = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    return hashlib.sha256(b"".join(sized)).digest()
