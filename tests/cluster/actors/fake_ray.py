"""Ray in this process: actors whose calls end as a test says, for tests of their handles."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

PENDING = object()
"""Result of a call that has not ended."""


@dataclass(eq=False)
class Reference:
    """A call of an actor's method."""

    actor: int
    method: str
    arguments: tuple[Any, ...]


class FakeRay:
    """Functions of the module `ray`, for one module that uses them.

    Args:
        result: Returns the result of a call, an error that it raises, or `PENDING`.
        nodes: Nodes of the cluster.
    """

    def __init__(self, result, nodes=()):
        self._result, self._nodes = result, nodes
        self.calls: list[Reference] = []
        self.killed: list[int] = []
        self._counts = Counter()

    def remote(self, *given, **_):
        return FakeClass(self) if given else lambda _: FakeClass(self)

    def started(self):
        self._counts["actors"] += 1
        return FakeActor(self, self._counts["actors"])

    def nodes(self):
        return self._nodes

    def kill(self, actor):
        self.killed.append(actor.number)

    def get(self, reference):
        result = self._result(reference)
        if isinstance(result, Exception):
            raise result
        return result

    def wait(self, references, *, num_returns=1, timeout=None):
        ready = [x for x in references if self._result(x) is not PENDING][:num_returns]
        return ready, [x for x in references if x not in ready]


class FakeClass:
    """A class or function of `ray.remote`."""

    def __init__(self, ray):
        self._ray = ray

    def options(self, **_):
        return self

    def remote(self, *_, **__):
        return self._ray.started()


@dataclass(eq=False)
class FakeActor:
    """An actor by the number of its start, the first being 1."""

    ray: FakeRay
    number: int

    def __getattr__(self, method):
        return FakeMethod(self, method)


@dataclass(eq=False)
class FakeMethod:
    """A method of an actor."""

    actor: FakeActor
    name: str

    def options(self, **_):
        return self

    def remote(self, *arguments):
        reference = Reference(self.actor.number, self.name, arguments)
        self.actor.ray.calls.append(reference)
        return reference
