"""Loads of steps, and heads that learn power from them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from power_steps import PRIOR, steps_of, traced_workloads, traces

from trappm.learner.heads.physics_heads import heads_from_tensors, train_heads
from trappm.learner.interface import Workload
from trappm.learner.paper.presets import LAPTOP
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.physics.power import PowerPrior, loads_of
from trappm.learner.physics.step_time import StepTimePrior
from trappm.profiler.errors import InputError
from trappm.profiler.records import Graph, Phase, Precision
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import TraceSettings


@pytest.fixture(scope="module")
def workloads():
    return traced_workloads()


def test_loads_are_those_of_the_kernels(workloads):
    loads = loads_of(workloads, PRIOR)
    for row, workload in enumerate(workloads):
        kernels = workload.kernels.at(workload.batch_size)
        products = kernels.table.kinds < 7
        flops = (kernels.table.counts * kernels.sizes[:, 2])[products].sum()
        touched = (kernels.table.counts * kernels.sizes[:, :2].sum(1)).sum()
        assert loads.operations[row].sum() == pytest.approx(flops, rel=1e-6)
        assert 0 < loads.bytes[row] < touched + 40 * workload.kernels.parameters
    assert np.all(loads.launch_ms <= loads.device_ms)
    mixed = trace("test_resnet", 160, TraceSettings(precision=Precision.AMP_FP16))
    half = replace(workloads[0], kernels=mixed.kernels)
    assert loads_of([half], PRIOR).operations[0, 1] > 0 == loads.operations[0, 1]
    infers = traced_workloads(Phase.INFER)
    assert np.all(loads_of(infers, PRIOR).operations.sum(1) < 0.5 * loads.operations.sum(1))
    with pytest.raises(InputError, match="without kernels"):
        loads_of([Workload(graph=Graph.empty(1))], PRIOR)


@pytest.mark.extension("power_limits")
def test_campaign_heads_learn_power_from_kernels_and_step_times():
    """On a slow host small steps wait and draw little, which nothing but kernels and times tell."""
    random = np.random.default_rng(0)
    rows = [
        Workload(graph=traced.graph.at(batch), kernels=traced.kernels, phase=traced.phase)
        for both in zip(*map(traces, Phase), strict=True)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
        for traced in both
    ]
    groups = [str(i // 16) for i in range(len(rows))]
    spec = replace(PRIOR.spec, dispatch_us=40.0)
    steps, time_ms = steps_of(rows, prior=StepTimePrior(spec))
    limit = np.full(len(rows), 1e4)
    power = steps.under(limit).power_w * np.exp(0.02 * random.normal(size=len(rows)))
    targets = np.stack([time_ms, np.full(len(rows), np.nan), power], axis=1)
    heads = train_heads(
        rows, targets, groups=groups, preset=LAPTOP.head, generator=random, spec=PRIOR.spec
    )
    assert isinstance(heads.heads["power_w"].prior, PowerPrior)
    got = heads.predict(rows)
    at = got.metrics.index("power_w")
    assert np.median(np.abs(got.median[:, at] / power - 1)) < 0.06
    assert power.max() > 2.5 * power.min()
    again = heads_from_tensors(LAPTOP.head, heads.settings(), heads.tensors())
    assert np.array_equal(again.predict(rows).median, got.median)
    assert heads.predict([]).median.shape == (0, len(got.metrics))
    # Another device begins with its constants, and has its own times.
    prior = heads.heads["power_w"].prior
    other = PowerPrior.with_times(PRIOR).started_from(prior)
    assert np.array_equal(other.log_constants, prior.log_constants)
    assert other.times is PRIOR
    broken = {**prior.tensors(), "full_w": torch.zeros(6, dtype=torch.float64)}
    with pytest.raises(ValueError, match="not positive"):
        PowerPrior.from_tensors(broken)


@pytest.mark.parametrize(("untraced", "kind"), [(2, StepTimePrior), (4, GraphPrior)])
def test_step_time_uses_kernels_if_most_labels_have_them(untraced, kind):
    rows = [
        Workload(
            graph=traced.graph.at(batch), kernels=traced.kernels if place >= untraced else None
        )
        for traced in traces()
        for place, batch in enumerate((1, 2, 4, 8, 16, 32))
    ]
    known = [replace(w, kernels=traces()[i // 6].kernels) for i, w in enumerate(rows)]
    targets = np.full((len(rows), 3), np.nan)
    targets[:, 0] = np.exp(PRIOR.log_values(known))
    heads = train_heads(
        rows, targets, groups=[str(i // 6) for i in range(len(rows))], preset=LAPTOP.head,
        generator=np.random.default_rng(0), spec=PRIOR.spec,
    )  # fmt: skip
    assert isinstance(heads.heads["step_time_ms"].prior, kind)
    if kind is StepTimePrior:
        assert heads.predict(rows).metrics == ()
    assert heads.predict(known).metrics == ("step_time_ms",)
