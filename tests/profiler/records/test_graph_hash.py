"""The content hash: blind to the order of nodes, and to nothing else."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trappm.profiler.errors import TrappmError
from trappm.profiler.records import GraphTemplate
from trappm.profiler.records.graph import graph_hash

SIZES = ("input_shapes", "output_shapes", "macs", "memory_bytes")


@st.composite
def templates(draw):
    count = draw(st.integers(2, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    possible = [(i, j) for j in range(count) for i in range(j)]
    edges = [pair for pair in possible if rng.random() < 0.3]
    # Few values, so that many nodes look alike and only their neighbours tell them apart.
    shapes = {name: rng.integers(0, 2, (count, 6)) for name in SIZES[:2]}
    numbers = {name: rng.integers(0, 2, count) for name in SIZES[2:]}
    return GraphTemplate(
        operators=tuple(rng.choice(["Add", "Conv"], count).tolist()),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        constant=shapes | numbers,
        slope={name: np.zeros_like(values) for name, values in (shapes | numbers).items()},
        parameters=rng.integers(0, 2, count),
    )


def reordered(template, rng):
    """The same graph, its nodes in another topological order."""
    count = len(template.operators)
    waiting = {j: set(template.edges[template.edges[:, 1] == j, 0].tolist()) for j in range(count)}
    order = []
    while waiting:
        ready = [j for j, sources in waiting.items() if not sources - set(order)]
        order.append(ready[rng.integers(len(ready))])
        del waiting[order[-1]]
    place = np.argsort(order)
    return dataclasses.replace(
        template,
        operators=tuple(template.operators[i] for i in order),
        edges=rng.permutation(place[template.edges]) if len(template.edges) else template.edges,
        constant={name: values[order] for name, values in template.constant.items()},
        slope={name: values[order] for name, values in template.slope.items()},
        parameters=template.parameters[order],
    )


@given(templates(), st.integers(0, 2**32))
def test_node_order_does_not_change_the_hash(template, seed):
    again = reordered(template, np.random.default_rng(seed))
    assert again.content_hash == template.content_hash
    assert len(template.content_hash) == 64


@given(templates(), st.data())
def test_changed_numbers_change_the_hash(template, data):
    node = data.draw(st.integers(0, len(template.operators) - 1))
    part = data.draw(st.sampled_from(["constant", "slope", "parameters", "operators"]))
    if part == "operators":
        operators = list(template.operators)
        operators[node] = "Relu"
        other = dataclasses.replace(template, operators=tuple(operators))
    elif part == "parameters":
        other = dataclasses.replace(template, parameters=template.parameters.copy())
        other.parameters[node] += 5
    else:
        name = data.draw(st.sampled_from(SIZES))
        sizes = {key: values.copy() for key, values in getattr(template, part).items()}
        sizes[name][node] += 5
        other = dataclasses.replace(template, **{part: sizes})
    assert other.content_hash != template.content_hash


@given(templates(), st.data())
def test_changed_edges_change_the_hash(template, data):
    count = len(template.operators)
    edge = sorted(
        data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    )
    edges = {tuple(pair) for pair in template.edges.tolist()} ^ {tuple(edge)}
    other = dataclasses.replace(
        template, edges=np.array(sorted(edges), dtype=np.int64).reshape(-1, 2)
    )
    assert other.content_hash != template.content_hash


def test_fixed_batch_sizes_change_the_hash():
    lengths = {"input_shapes": (1, 6), "output_shapes": (1, 6), "macs": 1, "memory_bytes": 1}
    sizes = {name: np.ones(length, dtype=np.int64) for name, length in lengths.items()}
    graph = GraphTemplate(
        operators=("Relu",),
        edges=np.zeros((0, 2), dtype=np.int64),
        constant=sizes,
        slope=sizes,
        parameters=np.zeros(1, dtype=np.int64),
    )
    fixed = dataclasses.replace(graph, fixed_batch_size=4)
    assert fixed.content_hash != graph.content_hash


def test_cycles_are_refused():
    with pytest.raises(TrappmError, match="topological order"):
        graph_hash(["Add", "Add"], np.array([[0, 1], [1, 0]]), np.zeros((2, 1), dtype=np.int64))
