"""The memory of a training step by rules from the graph alone, where no step can be traced.

What autograd keeps follows from the operators: a convolution keeps its input, a norm its input and
its statistics, a ReLU its output; views keep what they are views of, once. Exporters take GELU,
SiLU and attention apart, which are found again here by the shape of their chains. How well this
meets the exact bytes, `benchmarks/profiler/rebuilt_modules.py` tells.
"""

from __future__ import annotations

import math

import numpy as np

from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT
from trappm.profiler.records import Graph, IntArray, Optimizer
from trappm.profiler.simulation.memory_simulation import (
    MIB,
    TEMPORARIES_PER_PARAMETER,
    Loop,
    SimulatedMemory,
)

_KEEP_INPUT = frozenset(
    {"AveragePool", "BatchNormalization", "Clip", "Conv", "ConvTranspose", "Cos", "Elu", "Erf",
     "Gelu", "Gemm", "GroupNormalization", "HardSigmoid", "HardSwish", "InstanceNormalization",
     "LayerNormalization", "Log", "MaxPool", "Mish", "PRelu", "Pow", "RMSNormalization", "Sin",
     "Softplus"}
)  # fmt: skip
_KEEP_OUTPUT = frozenset(
    {"Exp", "LeakyRelu", "LogSoftmax", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softmax", "Sqrt",
     "Tanh"}
)  # fmt: skip
_KEEP_FACTORS = frozenset({"Div", "Einsum", "MatMul", "Mul"})
_VIEWS = frozenset(
    {"Expand", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)

_TEMPORARY_SHARE = 0.4
"""Of the largest tensor: what is alive at the peak beside weights, gradients and what is kept."""
_RESERVED_SHARE = 1.1
"""Reserved over live memory. Both bring the median gap to simulated memory near 0, on
the models on which docs/static_profile.md says how large the gaps are."""


def saved_bytes_by_rules(graph: Graph) -> int:
    """Bytes that autograd keeps between the forward and the backward pass, in fp32, by rules."""
    return _Rules(graph).saved


def memory_by_rules(
    graph: Graph, optimizer: Optimizer = Optimizer.SGD, loop: Loop = Loop.PLAIN
) -> SimulatedMemory:
    """What a step needs by rules: weights, gradients, states, what autograd keeps, a temporary.

    The peak is somewhere in the backward pass, which frees what was kept while gradients arrive, or
    in the optimizer's step. Scratch memory of convolutions is not estimated. Optimizer and
    loop are as for `memory_simulation.simulate_memory`.
    """
    rules = _Rules(graph)
    weights = BYTES_PER_ELEMENT * graph.parameters
    total = int(weights.sum())
    states = loop.states_per_parameter(optimizer) * total
    gradients = weights[::-1].cumsum()[::-1]
    backward = int((rules.kept_until() + gradients).max(initial=0))
    backward += int(_TEMPORARY_SHARE * max(rules.sizes, default=0))
    stepping = total * (1 + TEMPORARIES_PER_PARAMETER[optimizer] + (loop is Loop.TUNED))
    live = (total + states + max(backward, stepping)) / MIB
    reserved = live * _RESERVED_SHARE
    return SimulatedMemory(
        live_mib=live, reserved_mib=reserved, reserved_with_workspace_mib=reserved
    )


_IMAGE = -1


class _Rules:
    """Walks the nodes in order and collects the tensors that are kept, each storage once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._trained = (graph.parameters > 0).tolist()
        self._shapes = [[n for n in shape if n] for shape in graph.output_shapes.tolist()]
        self._inputs = [[n for n in shape if n] for shape in graph.input_shapes.tolist()]
        self.sizes: list[int] = (graph.memory_bytes - BYTES_PER_ELEMENT * graph.parameters).tolist()
        """Bytes of each node's results."""
        self._sources: list[list[int]] = [[] for _ in graph.operators]
        self._readers: list[list[int]] = [[] for _ in graph.operators]
        for source, reader in graph.edges.tolist():
            self._sources[reader].append(source)
            self._readers[source].append(reader)
        images = zip(self._inputs, self._sources, strict=True)
        self._image_bytes = max(
            (BYTES_PER_ELEMENT * math.prod(shape) for shape, sources in images if not sources),
            default=0,
        )
        self._inside: set[int] = set()
        self._attended: set[int] = set()
        """Results of fused attention, which lie so that joining the heads copies nothing."""
        self._kept: dict[int | tuple[str, int], int] = {}
        for node in range(graph.node_count):
            self._find_chain(node)
        for node in range(graph.node_count):
            if node not in self._inside:
                self._keep_for(node)

    @property
    def saved(self) -> int:
        return sum(self._kept.values())

    def kept_until(self) -> IntArray:
        """Bytes that are still kept when the backward pass comes to each node (N)."""
        kept = np.zeros(self._graph.node_count + 1, dtype=np.int64)  # the images first
        for key, size in self._kept.items():
            kept[(key[1] if isinstance(key, tuple) else key) - _IMAGE] += size
        return kept.cumsum()[1:]

    def _is(self, node: int, operator: str) -> bool:
        return node != _IMAGE and self._graph.operators[node] == operator

    def _before(self, node: int) -> int:
        return self._sources[node][0] if self._sources[node] else _IMAGE

    def _after(self, node: int, *operators: str) -> list[int]:
        """The chain of only readers of these operators behind a node; empty if there is none."""
        chain = []
        for operator in operators:
            readers = self._readers[node]
            if len(readers) != 1 or not self._is(readers[0], operator):
                return []
            node = readers[0]
            chain.append(node)
        return chain

    def _keep(self, node: int) -> None:
        """Keeps the storage that a node's result lies in: its own, or what it is a view of."""
        while node != _IMAGE and self._is_view(node):
            below = self._before(node)
            joins = self._is(node, "Reshape") and self._is(below, "Transpose")
            if joins and self._before(below) not in self._attended:
                break  # joining transposed axes copies
            node = below
        self._kept[node] = self._image_bytes if node == _IMAGE else self.sizes[node]

    def _is_view(self, node: int) -> bool:
        picks_one = self._is(node, "Gather") and len(self._shapes[node]) < len(self._inputs[node])
        return picks_one or self._graph.operators[node] in _VIEWS

    def _is_permuted(self, node: int) -> bool:
        """Whether the result is a part of another one whose axes were exchanged."""
        seen = set()
        while node != _IMAGE and self._is_view(node):
            seen.add(self._graph.operators[node])
            node = self._before(node)
        return "Transpose" in seen and len(seen) > 1

    def _keep_more(self, node: int, elements: int, size: int = BYTES_PER_ELEMENT) -> None:
        """Keeps a tensor that is no node's result: statistics, indices."""
        self._kept["more", node] = elements * size

    def _find_chain(self, node: int) -> None:
        """Finds what exporters took apart: nothing inside is kept but what the whole keeps."""
        operator = self._graph.operators[node]
        if operator == "Erf" and (rest := self._after(node, "Add", "Mul")):
            scaled = self._before(node)
            self._inside |= {scaled, node, *rest, *self._after(rest[-1], "Mul")}
            self._keep(self._before(scaled))
        elif operator == "Tanh" and (rest := self._after(node, "Add", "Mul")):
            argument = self._before(node)
            total = self._before(argument)
            cubes = self._chain_of_products(total)
            if cubes:
                self._inside |= {argument, total, node, *cubes, *rest}
                self._inside.update(self._after(rest[-1], "Mul"))
                self._keep(self._before(cubes[-1]))
        elif operator == "Sigmoid" and (rest := self._after(node, "Mul")):
            if self._before(node) in self._sources[rest[0]]:
                self._inside |= {node, rest[0]}
                self._keep(self._before(node))
        elif operator == "InstanceNormalization" and (rest := self._after(node, "Reshape", "Mul")):
            self._inside.add(rest[-1])
        elif operator == "Softmax":
            self._find_attention(node)

    def _chain_of_products(self, total: int) -> list[int]:
        """From x + 0.0447 x^3, the products that end in x."""
        if not self._is(total, "Add"):
            return []
        chain: list[int] = []
        node = next((s for s in self._sources[total] if self._is(s, "Mul")), _IMAGE)
        while self._is(node, "Mul") and len(chain) < 3:
            chain.append(node)
            products = [s for s in self._sources[node] if self._is(s, "Mul")]
            node = products[-1] if products else _IMAGE
        return chain if len(chain) == 3 else []

    def _find_attention(self, softmax: int) -> None:
        """Attention that was one call has both queries and keys scaled; it keeps no scores."""
        scores = self._before(softmax)
        mask = scores
        if self._is(scores, "Add"):
            scores = next((s for s in self._sources[scores] if self._is(s, "MatMul")), _IMAGE)
        result = self._after(softmax, "MatMul")
        if not result or not self._is(scores, "MatMul") or len(self._shapes[softmax]) != 4:
            return
        scaled = self._sources[scores]
        if len(scaled) != 2 or any(self._is_scale(s) is False for s in scaled):
            return
        values = [s for s in self._sources[result[0]] if s != softmax]
        self._inside |= {scores, mask, softmax, *scaled, *result}
        self._attended.update(result)
        for tensor in (*map(self._before, scaled), *values, *result):
            self._keep(tensor)
        batch, heads, queries, _ = self._shapes[softmax]
        self._keep_more(softmax, batch * heads * math.ceil(queries / 32) * 32)

    def _is_scale(self, node: int) -> bool:
        return self._is(node, "Mul") and len(self._sources[node]) == 1 and not self._trained[node]

    def _keep_for(self, node: int) -> None:
        operator = self._graph.operators[node]
        sources = self._sources[node] or [_IMAGE]
        if operator in _KEEP_INPUT:
            self._keep(sources[0])
        elif operator in _KEEP_OUTPUT:
            self._keep(node)
        elif operator in _KEEP_FACTORS:
            with_weights = self._trained[node] or operator == "MatMul"
            for source in sources if with_weights or len(sources) > 1 else ():
                if operator == "MatMul" and len(sources) > 1 and self._is_permuted(source):
                    self._keep_more(source, self.sizes[source], 1)  # batched products copy it
                else:
                    self._keep(source)
        shape = self._shapes[node]
        if operator == "MaxPool":
            self._keep_more(node, math.prod(shape), 8)
        elif operator == "BatchNormalization":
            self._keep_more(node, 2 * shape[1])
        elif operator in ("InstanceNormalization", "GroupNormalization"):
            self._keep_more(node, 2 * math.prod(shape[:2]))
        elif operator == "LayerNormalization":
            self._keep_more(node, 2 * math.prod(shape[:-1]))
