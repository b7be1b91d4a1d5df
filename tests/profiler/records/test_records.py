"""Records without torch, and the content hash: blind to the order of nodes, and to nothing else."""

import dataclasses
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trappm.profiler.errors import InputError, MissingLibraryError, TrappmError
from trappm.profiler.records import (
    Configuration,
    Execution,
    Graph,
    GraphTemplate,
    Optimizer,
    Phase,
    Precision,
    Protocol,
)

RESNET = Configuration(architecture="resnet18", batch_size=4, input_size=96)
SCALED = ("input_shapes", "output_shapes", "macs", "memory_bytes")

configurations = st.builds(
    Configuration,
    architecture=st.sampled_from(["resnet18", "vgg11"]),
    batch_size=st.integers(1, 2048),
    input_size=st.integers(1, 1024),
    precision=st.sampled_from(Precision),
    optimizer=st.sampled_from(Optimizer),
    phase=st.sampled_from(Phase),
    execution=st.sampled_from(Execution),
)


def test_configuration_ids_never_change():
    """Stores and snapshots hold ids: a change here breaks every one of them."""
    assert RESNET.id == "e8e62b42ca1afdf26e3f"


@given(configurations, configurations)
def test_ids_are_equal_exactly_for_equal_configurations(first, second):
    assert (first.id == second.id) == (first == second)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", ""),
        ("batch_size", 0),
        ("batch_size", 1_000_001),
        ("batch_size", True),
        ("input_size", -3),
        ("precision", "fp8"),
    ],
)
def test_invalid_configurations_are_refused(field, value):
    with pytest.raises(InputError):
        dataclasses.replace(RESNET, **{field: value})


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 6))
    sizes = st.integers(0, 2**40)
    array = lambda *shape: np.array(  # noqa: E731
        draw(st.lists(sizes, min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))),
        dtype=np.int64,
    ).reshape(shape)
    return Graph(
        operators=draw(st.tuples(*[st.sampled_from(["Conv", "Relu"])] * count)),
        edges=np.array([(i, i + 1) for i in range(count - 1)], dtype=np.int64).reshape(-1, 2),
        input_shapes=array(count, 6),
        output_shapes=array(count, 6),
        macs=array(count),
        parameters=array(count),
        memory_bytes=array(count),
        batch_size=2,
    )


def scaled(graph, factor, batch_size):
    sizes = {name: getattr(graph, name) * factor for name in SCALED}
    return dataclasses.replace(graph, batch_size=batch_size, **sizes)


@given(graphs(), st.integers(1, 4096))
def test_templates_extrapolate_over_batch_sizes(unit, batch_size):
    template = GraphTemplate.from_graphs(*(scaled(unit, b, b) for b in (2, 3, 5)))
    graph = template.at(batch_size)
    for name in SCALED:
        assert np.array_equal(getattr(graph, name), getattr(unit, name) * batch_size)
    assert graph.batch_size == batch_size


def test_sizes_not_affine_in_the_batch_are_refused():
    ones = {name: np.ones((1, 6) if "shapes" in name else 1, dtype=np.int64) for name in SCALED}
    unit = dataclasses.replace(
        Graph.empty(1), operators=("Conv",), parameters=np.ones(1, dtype=np.int64), **ones
    )
    with pytest.raises(TrappmError, match="not affine"):
        GraphTemplate.from_graphs(*(scaled(unit, b * b, b) for b in (2, 3, 5)))
    other = dataclasses.replace(unit, operators=("Relu",))
    with pytest.raises(TrappmError, match="structure"):
        GraphTemplate.from_graphs(unit, other, unit)


def test_attributes_that_grow_with_the_batch_are_affine():
    def grouped(batch_size, groups):
        return dataclasses.replace(
            Graph.empty(batch_size), operators=("Conv",), signatures=(f"group={groups} pads=1",)
        )

    def template(*groups):
        graphs = (grouped(b, g) for b, g in zip((2, 3, 5), groups, strict=False))
        return GraphTemplate.from_graphs(*graphs)

    assert template(8, 12, 20).signatures == ("group=0+4n pads=1",)
    for groups in ((4, 9, 25), (2, 2, 3)):
        with pytest.raises(TrappmError, match="structure"):
            template(*groups)


@settings(max_examples=25)
@given(graphs())
def test_templates_are_read_back_unchanged(graph):
    with pytest.raises(InputError, match="fixed at 2, not 3"):
        GraphTemplate.fixed(graph).at(3)
    for template in (
        GraphTemplate.fixed(graph),
        GraphTemplate.from_graphs(*(scaled(graph, b, b) for b in (2, 3, 5))),
    ):
        again = GraphTemplate.from_bytes(template.to_bytes())
        assert again.operators == template.operators
        assert again.fixed_batch_size == template.fixed_batch_size
        assert again.content_hash == template.content_hash
        for name in SCALED:
            assert np.array_equal(getattr(again.at(2), name), getattr(template.at(2), name))


def test_a_share_of_the_configurations_has_power():
    steps = [
        Configuration(architecture="vgg11", batch_size=n, input_size=96) for n in range(1, 901)
    ]
    chosen = {
        share: {each for each in steps if Protocol(power_share=share).measures_power(each)}
        for share in (0.0, 0.25, 0.5, 1.0)
    }
    assert chosen[0.0] == set()
    assert chosen[1.0] == set(steps)
    assert chosen[0.25] < chosen[0.5]  # a larger share adds to a smaller one
    assert len(chosen[0.25]) == pytest.approx(225, rel=0.2)
    with pytest.raises(InputError, match=r"power_share of 1\.5; it must be"):
        Protocol(power_share=1.5)


def test_records_from_before_the_power_share_equal_those_of_today():
    earlier = Protocol(name="adaptive").to_dict()
    del earlier["power_share"]
    assert Protocol(**earlier) == Protocol(name="adaptive")


# The content hash.


SIZES = ("input_shapes", "output_shapes", "macs", "memory_bytes")


@st.composite
def templates(draw):
    count = draw(st.integers(2, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    possible = [(i, j) for j in range(count) for i in range(j)]
    edges = [pair for pair in possible if rng.random() < 0.3]
    # Few values, so that many nodes are equal except for their neighbours.
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
    part = data.draw(st.sampled_from(["constant", "slope", "parameters", "operators", "batch"]))
    if part == "batch":
        other = dataclasses.replace(template, fixed_batch_size=4)
    elif part == "operators":
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


def test_only_optimizers_of_other_libraries_need_one(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for optimizer in set(Optimizer) - {Optimizer.ADAMW_8BIT}:
        optimizer.require_library()
    with pytest.raises(MissingLibraryError, match="pip install bitsandbytes"):
        Optimizer.ADAMW_8BIT.require_library()
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    (tmp_path / "bitsandbytes.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    Optimizer.ADAMW_8BIT.require_library()
