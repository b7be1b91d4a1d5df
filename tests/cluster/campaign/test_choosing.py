"""Choices of a campaign's learner, and the requests of its planner."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from encoded_pool import hasty_encoders
from fakes import (
    BUDGET,
    SPEC,
    FakeLearner,
    FakeProfiler,
    FakeWorkers,
    campaign,
    labels_by_device,
    ran,
)

from trappm.cluster.campaign.learner import CampaignLearner
from trappm.cluster.campaign.planner import Choice, ChoiceRequest, _least_mib
from trappm.cluster.campaign.training import training_labels
from trappm.cluster.trace_tasks import trace_of
from trappm.learner.acquisition import STRATEGIES
from trappm.learner.acquisition.pool_knowledge import PoolKnowledge
from trappm.learner.interface import TrainingLabel
from trappm.learner.paper.presets import PRESETS
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.profiler.devices.catalogue import spec_of
from trappm.profiler.errors import InputError
from trappm.profiler.host import procfs
from trappm.profiler.models.families import family_of
from trappm.profiler.records import (
    Configuration,
    Execution,
    GraphTemplate,
    Precision,
    protocol_named,
)
from trappm.profiler.traced_step import TraceKey

ARCHITECTURES = ("resnet18", "resnet34", "densenet121", "vgg11", "swin_tiny_patch4_window7_224")
BATCHES = (1, 8, 64, 512)


def template(number: int) -> bytes:
    """A chain of convolutions whose activations grow with the number."""
    width = 4 * 2**number
    shapes = np.tile(np.array([0, width, 32, 32, 0, 0]), (6, 1))
    per_sample = np.tile(np.array([1, 0, 0, 0, 0, 0]), (6, 1))
    elements = np.full(6, width * 32 * 32)
    nothing = np.zeros(6, np.int64)
    return GraphTemplate(
        operators=("Conv", "Relu") * 3,
        edges=np.array([[i, i + 1] for i in range(5)]),
        constant={"input_shapes": shapes, "output_shapes": shapes, "macs": nothing,
                  "memory_bytes": nothing},
        slope={"input_shapes": per_sample, "output_shapes": per_sample,
               "macs": 9 * width * elements, "memory_bytes": 4 * elements},
        parameters=np.full(6, 9 * width**2),
    ).to_bytes()  # fmt: skip


POOL = [
    (Configuration(architecture=name, batch_size=batch, input_size=32), template(number))
    for number, name in enumerate(ARCHITECTURES)
    for batch in BATCHES
]
IDS = [c.id for c, _ in POOL]


def new_learner(cache, pool=POOL, *further, preset="laptop", strategy="ours") -> CampaignLearner:
    learner = CampaignLearner(preset=preset, strategy=strategy, source="a100", seed=7, cache=cache)
    learner.set_pool(pool, *further)
    return learner


@pytest.fixture(scope="module", autouse=True)
def encoders_that_hardly_learn():
    with hasty_encoders():
        yield


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """Learners by strategy, with one encoder."""
    cache = tmp_path_factory.mktemp("cache")
    return lambda strategy: new_learner(cache, strategy=strategy)


GPUS = {"source": "a100", "target": "v100"}


def query(count=4, seed=(7, 1, 0), **changes):
    given = {"device": "a100", "candidates": IDS, "known": (), **changes}
    return ChoiceRequest(count=count, seed=seed, **given)


def picks(learner, request):
    return [choice.configuration_id for choice in learner.choose(request)]


def asked(learner, **changes):
    """What the strategy of this learner is asked for a choice."""
    requests, select = [], learner._strategy.select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner._strategy, "select", lambda r: requests.append(r) or select(r))
        learner.choose(query(**changes))
    return requests[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_chooses_without_labels_and_by_the_seed_alone(learner, strategy):
    chosen = picks(learner(strategy), query())
    assert len(set(chosen)) == 4
    assert picks(learner(strategy), query()) == chosen


def test_runs_that_exceed_the_memory_for_sure_are_chosen_last(tmp_path):
    huge = [
        (Configuration(architecture=name, batch_size=1 << 17, input_size=32), template(number + 3))
        for number, name in enumerate(ARCHITECTURES)
    ]
    ours = new_learner(tmp_path, [*POOL, *huge])
    dying = {c.id for c, _ in huge}
    candidates = [*IDS, *dying]
    assert dying & set(picks(ours, query(count=8, candidates=candidates)))
    guarded = ours.choose(query(count=8, candidates=candidates, capacity_mib=16_000.0))
    assert not dying & {c.configuration_id for c in guarded}
    every = ours.choose(query(count=len(candidates), candidates=candidates, capacity_mib=16_000.0))
    assert {c.configuration_id for c in every[-len(dying) :]} == dying
    assert min(c.reason["probability_of_failure"] for c in every[-len(dying) :]) > 0.99


def test_no_choice_depends_on_held_out_configurations(learner):
    ours, candidates, known = learner("ours"), IDS[8:16], IDS[2:4]
    changes = {"candidates": candidates, "known": known, "unsteady": {IDS[9]: 1}}
    assert set(picks(ours, query(**changes))) <= set(candidates)
    request = asked(ours, **changes)
    assert len(request.embeddings) == 10
    assert np.array_equal(request.embeddings, ours._pool.embeddings[[2, 3, *range(8, 16)]])
    assert request.labelled.tolist() == [0, 1]
    assert request.noise_factor.tolist() == [1, 1, 1, 4, 1, 1, 1, 1, 1, 1]


SETTINGS = {"architecture": "test_resnet", "input_size": 64}


@pytest.fixture(scope="module")
def traced_pool(tmp_path_factory):
    """A pool in two precisions, its two traces, and a folder for their encoder."""
    configurations = [
        Configuration(**SETTINGS, batch_size=batch, precision=precision)
        for precision in (Precision.FP32, Precision.AMP_FP16)
        for batch in (1, 4, 16, 64)
    ]
    made = [trace_of(TraceKey.of(c)).made for c in configurations[::4]]
    return configurations, made, tmp_path_factory.mktemp("cache")


@pytest.fixture
def traced(traced_pool):
    """A learner of the pool in two precisions, and the pool."""
    configurations, (fp32, half), cache = traced_pool
    learner = new_learner(
        cache,
        [(c, fp32.graph.to_bytes()) for c in configurations],
        [fp32.to_bytes()] * 4 + [half.to_bytes()] * 4,
    )
    return learner, configurations


def labels_of(configurations, device, card=None):
    values = [(3.0 + c.batch_size, 900.0, None) for c in configurations]
    return [
        TrainingLabel(c.id, device, "train", value, "measured", card=card)
        for c, value in zip(configurations, values, strict=True)
    ]


def test_only_known_devices_use_kernels(traced):
    learner, configurations = traced
    for device, expected in (("a100", 8), ("nobodys", 0)):
        workloads = learner._pool.workloads(device)
        assert [w.kernels is not None for w in workloads] == [i < expected for i in range(8)]
        learner.fit(labels_of(configurations, device))
        assert learner._heads[device].needs_kernels == bool(expected)
        request = query(count=2, device=device, candidates=[c.id for c in configurations])
        assert len(set(picks(learner, request))) == 2


A100_80GB = "a100 sxm4 80gb"


@pytest.mark.parametrize(("card", "sheet"), [(None, "a100-40gb"), (A100_80GB, "a100-80gb")])
def test_heads_start_from_the_data_sheet_of_the_card_in_their_snapshot(
    traced, tmp_path, card, sheet
):
    learner, configurations = traced
    learner.fit(labels_of(configurations, "a100", card))
    assert learner._heads["a100"].heads["step_time_ms"].prior.spec == spec_of(sheet)
    snapshot = load_snapshot(tmp_path / learner.publish(tmp_path, {})[0])
    assert snapshot.card("a100") == (card or "a100")
    assert snapshot.manifest.families == sorted({family_of(c.architecture) for c in configurations})


def test_choices_depend_on_the_data_sheet_of_the_card(traced):
    learner, configurations = traced

    def costs(**changes):
        candidates = [c.id for c in configurations[:4]]
        return asked(learner, candidates=candidates, **changes).predicted_cost

    plain = costs()
    assert (costs(card=A100_80GB) < plain).all()
    learner.fit(labels_of(configurations[:3], "a100", A100_80GB))
    assert (costs(card="a100") < plain).all(), "the campaign's own labels know it better"


def test_a_source_that_is_not_a_known_gpu_does_not_inform_a_gpu(traced):
    learner, configurations = traced
    learner._source = "cpu-2t"
    assert not asked(learner, device="v100", candidates=[c.id for c in configurations]).taught


@pytest.mark.parametrize(("device", "taught"), [("a100", False), ("v100", True)])
def test_choices_on_a_target_gpu_use_the_constants_of_other_gpus(traced, device, taught):
    """Before any label as well, and then from where labels of the source have its constants."""
    learner, configurations = traced
    workloads, metrics = learner._pool.workloads(device), ["step_time_ms", "memory_mib"]
    candidates = [c.id for c in configurations]

    def check(others):
        request = asked(learner, device=device, candidates=candidates, count=2)
        expected = PoolKnowledge.of(
            workloads, metrics, spec_of(device), np.random.default_rng([7, 2]), others=others
        )
        assert request.taught is taught
        times, memory = (c.features for c in request.covariances)
        assert np.array_equal(times, expected.covariances["step_time_ms"].features)
        assert np.array_equal(memory, expected.covariances["memory_mib"].features)

    check(known_devices() if taught else None)
    learner.fit(labels_of(configurations[:5], "a100"))
    source = learner._heads["a100"].heads["step_time_ms"].prior
    check(replace(known_devices(), centre=source.constants) if taught else None)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("a100", "v100", {"a100": 40_536.0, "v100": 16_160.0}),
        ("cpu-2t", "cpu-1t", dict.fromkeys(["cpu-2t", "cpu-1t"], procfs.allowed_memory_mib())),
    ],
)
def test_the_first_choice_uses_the_memory_of_known_devices(store, source, target, expected):
    learner, devices = FakeLearner(), {"source": source, "target": target}
    campaign(store, FakeWorkers(devices=(source, target)), learner, devices=devices).run()
    assert not any(r.known for r in learner.requests[:2])
    assert {r.device: r.capacity_mib for r in learner.requests[:2]} == expected


def test_measured_device_memory_overrides_the_catalogue(store):
    profiler = FakeProfiler("a100", "host")
    for mib in (38_000.0, 39_000.0):
        measurement = profiler.measure(POOL[0][0], protocol_named("quick"), f"label of {mib}")
        environment = {"stack_fingerprint": f"{mib}", "device_memory_mib": mib}
        store.measurements.record_many([replace(measurement, environment=environment)])
    learner = FakeLearner()
    campaign(store, FakeWorkers(devices=("a100", "v100")), learner, devices=GPUS).run()
    found = {r.device: r.capacity_mib for r in learner.requests}
    assert found == {"a100": 38_000.0, "v100": 16_160.0}


class Unlucky(FakeWorkers):
    """The first configuration that is to be trained on loses its workers, and then fails once."""

    def __init__(self, fault, losses=0):
        super().__init__()
        self.fault, self.victim, self.losses = fault, None, losses

    @staticmethod
    def is_for_training(task):
        return getattr(task, "role", None) == "train" and task.device == "cpu-2t"

    def start(self, worker, task, protocol):
        super().start(worker, task, protocol)
        if self.losses and self.is_for_training(task):
            self.losses -= 1
            self.faults[len(self.starts)] = "lost"

    def _measure(self, worker, task, cost, fault):
        if self.victim is None and self.is_for_training(task):
            self.victim, fault = task.configuration.id, self.fault
        return super()._measure(worker, task, cost, fault)


class Forgiving(FakeLearner):
    """Chooses what was unstable first."""

    def choose(self, request):
        first = sorted(request.candidates, key=lambda c: (c not in request.unsteady, c))
        super().choose(request)
        return [Choice(c, {"rank": i}) for i, c in enumerate(first[: request.count])]


def test_a_configuration_quarantined_as_unstable_can_be_chosen_again(store):
    """Losses of its workers do not make it unsteady."""
    losses = 2
    workers, learner = Unlucky("unstable", losses), Forgiving()
    run = ran(store, workers, learner, max_attempts=1)
    assert [r.unsteady for r in learner.requests if r.unsteady] == [{workers.victim: 1}]
    assert not store.assignments.of_campaign(run.id, state="failed")
    ours = store.assignments.of_campaign(run.id, device="cpu-2t")
    (again,) = [a for a in ours if a.configuration.id == workers.victim]
    assert (again.round_number, again.state, again.attempts) == (2, "done", losses + 2)
    assert labels_by_device(store, run.id).total() == sum(BUDGET.values()) - 1


def test_a_configuration_that_failed_with_an_error_is_not_chosen_again(store):
    workers, learner = Unlucky("error"), Forgiving()
    run = ran(store, workers, learner, max_attempts=1)
    assert not any(request.unsteady for request in learner.requests)
    (failed,) = store.assignments.of_campaign(run.id, state="failed")
    assert failed.configuration.id == workers.victim
    assert all(workers.victim not in r.known for r in learner.requests if r.device == failed.device)


def test_purely_learned_heads_choose_without_labels_with_them_and_for_the_target(
    tmp_path, monkeypatch
):
    paper = PRESETS["paper"]
    head = replace(paper.head, widths=(8, 8), hidden=(8, 8), members=2, steps=3)
    monkeypatch.setitem(PRESETS, "paper", replace(paper, head=head))
    learner = new_learner(tmp_path, preset="paper")
    assert len(set(picks(learner, query()))) == 4

    known, rest = IDS[:8], IDS[8:]
    labels = [
        TrainingLabel(name, "a100", "train", (1.0 + i, 500.0 + i, None), "measured")
        for i, name in enumerate(known)
    ]
    learner.fit(labels)
    assert set(picks(learner, query(known=known, candidates=rest))) <= set(rest)
    target = picks(learner, query(device="v100"))
    labels += [replace(label, device="v100") for label in labels]
    learner.fit(labels)
    left = [name for name in IDS if name not in target]
    again = picks(learner, query(device="v100", known=target, candidates=left))
    assert len(set(again)) == 4
    assert not set(again) & set(target)


def of_gpus(**group):
    groups = [{"architectures": ["resnet10t", "resnet14t", "resnet18", "convnext_atto"],
               "batch_sizes": [1, 2, 4], "input_sizes": [64], **group}]  # fmt: skip
    return {"devices": GPUS, "pool": {"groups": groups}, "canary": False}


def test_a_card_without_bf16_is_given_no_bf16(store):
    workers = FakeWorkers(devices=("a100", "v100"))
    run = ran(store, workers, **of_gpus(precisions=["fp32", "amp-bf16"]))
    planned = store.assignments.of_campaign(run.id)
    of = {d: {a.configuration.precision for a in planned if a.device == d} for d in GPUS.values()}
    assert of == {"a100": {"fp32", "amp-bf16"}, "v100": {"fp32"}}
    assert labels_by_device(store, run.id) == {"a100": 11, "v100": 6}
    with pytest.raises(InputError, match=r"the budget for v100 .* the pool has 0 and 0 that it"):
        campaign(store, workers, **of_gpus(precisions=["amp-bf16"])).run()


def test_a_chosen_step_is_measured_eager_and_compiled_where_triton_can(store):
    workers = FakeWorkers(devices=("a100", "v100"))
    settings = of_gpus(precisions=["amp-fp16"], executions=["eager", "compile"])
    run = ran(store, workers, initial={"source": 8, "target": 2}, **settings)
    steps = {(device, how): set() for device in GPUS.values() for how in ("eager", "compile")}
    for a in store.assignments.of_campaign(run.id):
        step = replace(a.configuration, execution="eager")
        steps[a.device, str(a.configuration.execution)].add(step)
    assert labels_by_device(store, run.id) == {"a100": 15, "v100": 6}
    assert {key: len(found) for key, found in steps.items()} == {
        ("a100", "eager"): 8, ("a100", "compile"): 7, ("v100", "eager"): 6, ("v100", "compile"): 0,
    }  # fmt: skip
    assert steps["a100", "compile"] <= steps["a100", "eager"]
    learned = training_labels(store, run.id).labels
    assert {x.configuration_id for x in learned if x.device == "a100"} == {
        c.id for c in steps["a100", "eager"]
    }


def test_what_surely_does_not_fit_is_not_drawn_for_the_evaluation_set(store):
    workers = FakeWorkers(devices=("a100", "v100"), trace_of=trace_of)
    evaluation = {"source": 4, "target": 4, "architecture_share": 0.3}
    settings = of_gpus(batch_sizes=[1, 2, 4, 8, 100_000])
    run = ran(store, workers, evaluation=evaluation, **settings)
    drawn = [a for a in store.assignments.of_campaign(run.id) if a.role == "evaluate"]
    assert len(drawn) == 8
    assert max(a.configuration.batch_size for a in drawn) == 8


def test_tensors_need_less_memory_only_in_types_of_fewer_bytes():
    fp32 = Configuration(architecture="test_resnet", batch_size=8, input_size=64)
    step = trace_of(TraceKey.of(fp32))
    least = {p: _least_mib(replace(fp32, precision=p), step.key, step.made) for p in Precision}
    assert least[Precision.FP32] > 0
    for precision, mib in least.items():
        assert mib == least[Precision.FP32] * (1.0 if precision.is_fp32 else 0.5)


class Compiling(FakeWorkers):
    """Workers on which compiled steps take half the time."""

    def _measure(self, worker, task, cost, fault):
        is_compiled = task.configuration.execution is Execution.COMPILE
        return super()._measure(worker, task, cost * (0.5 if is_compiled else 1.0), fault)


class Publishing(FakeLearner):
    def publish(self, folder, fields, pairs=(), registry=None):
        self.pairs = pairs
        return super().publish(folder, fields, pairs, registry)


def test_an_initial_round_with_too_few_eager_steps_is_refused(store):
    groups = [{**SPEC["pool"]["groups"][0], "executions": ["eager", "compile"]}]
    with pytest.raises(InputError, match="initial: source is 4, half of it compiled steps"):
        campaign(store, FakeWorkers(), pool={"groups": groups}).run()


def test_a_learner_gets_the_pairs_of_its_devices(store):
    learner = Publishing()
    groups = [{**SPEC["pool"]["groups"][0], "executions": ["eager", "compile"]}]
    initial = {"source": 8, "target": 2}
    ran(store, Compiling(), learner, pool={"groups": groups}, initial=initial)
    counts = Counter((pair.device, pair.is_held_out) for pair in learner.pairs)
    assert counts["cpu-2t", False] == 6
    assert counts["cpu-2t", True] == 1
    for pair in learner.pairs:
        eager, compiled = learner.pool[pair.eager], learner.pool[pair.compiled]
        assert replace(eager, execution=Execution.COMPILE) == compiled
        assert pair.log_ratio == pytest.approx(math.log(0.5))
