"""Collects the nodes of a forward pass as it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trappm.profiler.graphs.nodes import IMAGE, Node, Shape, Source, assemble
from trappm.profiler.records import Graph


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
        self.arguments: dict[str, Any] = {}
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            missing = place >= len(args) and argument.name not in kwargs
            self.arguments[argument.name] = argument.default_value if missing else given

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
