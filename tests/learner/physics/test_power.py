"""Power and energy of steps: what they are made of, and what a power limit does to them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from research.priors.power_fit import Labels, fit
from trappm.learner.heads.device_heads import heads_from_tensors, train_heads
from trappm.learner.paper.presets import LAPTOP
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.physics.power.operating_point import CONSTANTS, Sheet, Steps, loads_of
from trappm.learner.physics.power.power_prior import PowerPrior, power_of
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.profiler.devices.catalogue import card_of, cards
from trappm.profiler.errors import InputError
from trappm.profiler.records import Graph, Phase, Precision
from trappm.profiler.static_profile import graph_template, kernel_profile

CARD = "v100 pcie 32gb"
PRIOR = StepTimePrior(spec_of(CARD))


@pytest.fixture(scope="module")
def profiles():
    return [kernel_profile(name, 160) for name in ("test_resnet", "test_vit", "resnet18")]


@pytest.fixture(scope="module")
def workloads(profiles):
    return [
        Workload(graph=Graph.empty(batch), kernels=profile)
        for profile in profiles
        for batch in (1, 16, 128)
    ]


def graphs():
    return [graph_template(name, 160) for name in ("test_resnet", "test_vit", "resnet18")]


def constants(**values):
    """Of the V100, but for these."""
    known = dict(zip(CONSTANTS, np.exp(power_of(card_of(CARD)).constants.mean), strict=True))
    return np.log([{**known, **values}[name] for name in CONSTANTS])


def steps_of(workloads, slower=1.0, prior=PRIOR, **values):
    """Steps that take as long as is simulated, times a factor."""
    loads = loads_of(workloads, prior)
    time_ms = slower * np.exp(prior.log_values(workloads))
    limit = np.full(len(workloads), 250.0)
    return Steps.timed(loads, Sheet.of(card_of(CARD)), constants(**values), time_ms, limit), time_ms


def test_loads_are_those_of_the_kernels(workloads, profiles):
    loads = loads_of(workloads, PRIOR)
    for row, workload in enumerate(workloads):
        kernels = workload.kernels.at(workload.batch_size)
        products = kernels.table.kinds < 7
        flops = (kernels.table.counts * kernels.sizes[:, 2])[products].sum()
        touched = (kernels.table.counts * kernels.sizes[:, :2].sum(1)).sum()
        assert loads.operations[row].sum() == pytest.approx(flops, rel=1e-6)
        assert 0 < loads.bytes[row] < touched + 40 * workload.kernels.parameters
    assert np.all(loads.launch_ms <= loads.device_ms)
    half = replace(
        workloads[0], kernels=kernel_profile("test_resnet", 160, precision=Precision.AMP_FP16)
    )
    assert loads_of([half], PRIOR).operations[0, 1] > 0 == loads.operations[0, 1]
    infers = [replace(workload, phase=Phase.INFER) for workload in workloads]
    assert np.all(loads_of(infers, PRIOR).operations.sum(1) < 0.5 * loads.operations.sum(1))
    with pytest.raises(InputError, match="without kernels"):
        loads_of([Workload(graph=Graph.empty(1))], PRIOR)


def test_a_lower_power_limit_reduces_power_and_slows_steps(workloads):
    steps, time_ms = steps_of(workloads)
    limits = np.arange(260.0, 60.0, -20.0)
    points = [steps.under(np.full(len(workloads), limit)) for limit in limits]
    power = np.array([point.power_w for point in points])
    times = np.array([point.time_ms for point in points])
    assert np.all(np.diff(power, axis=0) <= 1e-6)
    assert np.all(np.diff(times, axis=0) >= -1e-6)
    assert np.all(power <= limits[:, None] * 1.001)
    # The time under the limit that was given is what was given.
    assert steps.under(np.full(len(workloads), 250.0)).time_ms == pytest.approx(time_ms, rel=0.01)
    free = steps.under(np.full(len(workloads), 1e4))
    assert np.all(free.clock == 1.0)
    assert free.power_w == pytest.approx(steps.at(np.ones(len(workloads)))[0])


def test_waiting_steps_draw_little_more_than_idle_power(workloads):
    steps, _ = steps_of(workloads, slower=50.0)
    idle = 250 * steps.values[CONSTANTS.index("idle")]
    under = steps.under(np.full(len(workloads), 250.0))
    assert np.all((idle < under.power_w) & (under.power_w < 1.35 * idle))
    # A limit costs it no time: the device has time enough.
    slow = steps.under(np.full(len(workloads), 100.0))
    assert slow.time_ms == pytest.approx(under.time_ms, rel=0.01)


def test_constants_are_recovered_from_labels(workloads):
    labels, sheet = [], Sheet.of(card_of(CARD))
    truth = {"a": constants(idle=0.1, full=0.9), "b": constants(idle=0.2, full=0.5)}
    for card, own in truth.items():
        steps, time_ms = steps_of(workloads)
        loads, usual = steps.loads, np.full(len(workloads), 250.0)
        for limit in (250.0, 100.0):
            limits = np.full(len(workloads), limit)
            point = Steps.timed(loads, sheet, own, time_ms, usual).under(limits)
            labels.append(Labels(card, sheet, loads, time_ms, usual, limits, point.power_w,
                                 point.time_ms, np.ones(len(workloads))))  # fmt: skip
    fitted = fit(labels)
    for part in labels:
        errors = part.errors(fitted.cards[part.card].mean)
        assert np.abs(errors).max() < 0.05
    idle = CONSTANTS.index("idle")
    a, b = (fitted.cards[name] for name in "ab")
    assert np.exp(b.mean[idle] - a.mean[idle]) == pytest.approx(2.0, rel=0.1)
    # Of another card less is known than of either, and the more so the more they differ.
    for known in (a, b):
        unsure = np.diag(fitted.unknown.covariance) / np.diag(known.covariance)
        assert unsure[idle] > 10
        assert np.all(unsure[[CONSTANTS.index("half"), CONSTANTS.index("tf32")]] == 1.0)
    assert a.mean[idle] < fitted.unknown.mean[idle] < b.mean[idle]


def test_campaign_heads_learn_power_from_kernels_and_step_times(profiles):
    """On a slow host small steps wait and draw little, which nothing but kernels and times tell."""
    random = np.random.default_rng(0)
    rows = [
        Workload(graph=profile.at(batch), kernels=kernels, phase=phase)
        for profile, kernels in zip(graphs(), profiles, strict=True)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
        for phase in Phase
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
def test_step_time_uses_kernels_if_most_labels_have_them(profiles, untraced, kind):
    rows = [
        Workload(graph=profile.at(batch), kernels=kernels if place >= untraced else None)
        for profile, kernels in zip(graphs(), profiles, strict=True)
        for place, batch in enumerate((1, 2, 4, 8, 16, 32))
    ]
    known = [replace(w, kernels=profiles[i // 6]) for i, w in enumerate(rows)]
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


def test_known_power_states_its_source_and_uncertainty():
    v100, a40 = power_of(card_of("v100-16gb")), power_of(card_of("a40"))
    assert (v100.limit_w, v100.sheet.power_w) == (300, 250)
    assert "Zeus" in v100.rests_on
    assert "this card's limit of" in a40.rests_on
    for name in ("idle", "full", "bytes"):
        at = CONSTANTS.index(name)
        assert a40.constants.covariance[at, at] > 4 * v100.constants.covariance[at, at]
    assert power_of(None) is power_of(card_of("a100-mig-1g.5gb")) is None
    for card in cards():
        known = power_of(card)
        assert (known is None) == (card.power_w is None)
        assert known is None or np.isfinite(np.linalg.cholesky(known.constants.covariance)).all()
