import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.records import (
    Configuration,
    Graph,
    GraphTemplate,
    Measurement,
    Optimizer,
    Outcome,
    Phase,
    Precision,
    Protocol,
    Provenance,
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
        ("batch_size", 1.0),
        ("batch_size", True),
        ("input_size", -3),
        ("precision", "fp8"),
        ("optimizer", "lion"),
    ],
)
def test_invalid_configurations_are_refused(field, value):
    with pytest.raises(InputError):
        dataclasses.replace(RESNET, **{field: value})


@st.composite
def graphs(draw, batch_size=2, **fixed):
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
        batch_size=batch_size,
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
    unit = Graph(
        operators=("Conv",),
        edges=np.zeros((0, 2), dtype=np.int64),
        input_shapes=np.ones((1, 6), dtype=np.int64),
        output_shapes=np.ones((1, 6), dtype=np.int64),
        macs=np.ones(1, dtype=np.int64),
        parameters=np.ones(1, dtype=np.int64),
        memory_bytes=np.ones(1, dtype=np.int64),
        batch_size=1,
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


@given(graphs())
def test_templates_are_read_back_unchanged(graph):
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


@given(graphs())
def test_fixed_templates_accept_only_their_batch_size(graph):
    template = GraphTemplate.fixed(graph)
    assert np.array_equal(template.at(2).macs, graph.macs)
    with pytest.raises(InputError, match="fixed at 2, not 3"):
        template.at(3)
    with pytest.raises(InputError, match="batch size is 0"):
        template.at(0)


def test_outcomes_are_parsed_from_text():
    fields = {
        "configuration": Configuration(architecture="resnet18", batch_size=1, input_size=64),
        "device": "cpu-1t",
        "protocol": Protocol(),
        "started_at": "2026-11-21T00:00:00+00:00",
        "duration_s": 1.0,
    }
    measurement = Measurement(outcome="ok", provenance="imported", **fields)
    assert measurement.outcome is Outcome.OK
    assert measurement.provenance is Provenance.IMPORTED
    with pytest.raises(InputError, match="outcome is 'fine'; it must be one of ok, oom"):
        Measurement(outcome="fine", **fields)
