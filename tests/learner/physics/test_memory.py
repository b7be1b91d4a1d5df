"""The prior of memory: what it says without labels, and what few labels make of its constants."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from network_zoo import GraphBuilder

from trappm.learner.heads.physics_heads import Head, Ours
from trappm.learner.interface import Targets, Workload
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.physics.memory import PROCESS_MIB, MemoryPrior, step_memory
from trappm.profiler.devices.catalogue import spec_of
from trappm.profiler.memory.simulation import LoopPreset, memory_of
from trappm.profiler.records import Phase
from trappm.profiler.trace import trace

NAMES = ("test_resnet", "test_vit", "test_convnext", "test_efficientnet", "test_mambaout")


@pytest.fixture(scope="module")
def traced():
    """Real workloads, three batch sizes each, and their architectures."""
    workloads, names = [], []
    for name in NAMES:
        step = trace(name, 96)
        for batch_size in (8, 64, 256):
            workloads.append(Workload(graph=step.graph.at(batch_size), trace=step))
            names.append(name)
    return workloads, names


@pytest.mark.parametrize("loop", LoopPreset)
def test_the_prior_agrees_with_the_simulation_in_both_loops(traced, loop):
    for workload in traced[0]:
        actual = step_memory(workload, loop)
        simulated = memory_of(workload.trace, workload.batch_size, loop=loop)
        assert actual.live_mib == pytest.approx(simulated.live_mib)
        total = actual.live_mib + actual.fragments_mib + actual.scratch_mib
        assert total == pytest.approx(simulated.reserved_with_workspace_mib)


def test_untraced_results_of_inference_live_until_their_last_reader_has_run():
    chain = GraphBuilder(batch_size=1)
    for inputs in ([], [0], [1]):
        chain.add("Relu", inputs, (1, 512, 512))  # 1 MiB each
    assert step_memory(Workload(graph=chain.build(), phase=Phase.INFER)).live_mib == 2.0


@pytest.mark.parametrize("loop", LoopPreset)
def test_labels_identify_the_training_loop(traced, loop):
    workloads, _ = traced
    start = MemoryPrior(np.log([0.01, 1.0, 1.0, 1.0]))  # the models are small too
    logs = MemoryPrior(start.log_constants, loop).log_values(workloads)
    fitted = start.refit(workloads, logs)
    assert fitted.loop is loop
    assert start.refit(workloads[:2], logs[:2], near=fitted).loop is loop
    np.testing.assert_allclose(fitted.log_values(workloads), logs, atol=0.02)
    assert MemoryPrior().started_from(fitted).loop is loop


def test_out_of_memory_runs_raise_the_prior(traced):
    workloads, _ = traced
    logs = MemoryPrior().log_values(workloads)
    missing = np.full(len(logs), np.nan)
    values = logs.copy()
    values[-1] = np.nan

    def after(bound):
        bounds = missing.copy()
        bounds[-1] = bound
        return MemoryPrior().refit(workloads, values, log_above=bounds).log_values(workloads)[-1]

    assert after(logs[-1] - 1.0) == pytest.approx(after(-5.0), abs=1e-6)
    assert after(logs[-1] + 0.1) > after(-5.0) + 1e-4


def test_process_memory_depends_on_the_gpu_generation(traced):
    """760 MiB in addition to the allocator and 65 in it on an H100: examples/data/h100."""
    workloads, _ = traced
    tensors = np.exp(MemoryPrior().log_values(workloads)) - PROCESS_MIB

    def process_mib(spec):
        return np.exp(MemoryPrior.on(spec).log_values(workloads)) - tensors

    np.testing.assert_allclose(process_mib(spec_of("h100")), 760 + 65)
    np.testing.assert_allclose(process_mib(spec_of("a100")), 760 + 17.25)
    np.testing.assert_allclose(process_mib(None), 760)
    infer = [replace(workload, phase=Phase.INFER) for workload in workloads]
    without, with_less = (
        np.exp(prior.log_values(infer))
        for prior in (MemoryPrior(), MemoryPrior.on(spec_of("h100")))
    )
    np.testing.assert_allclose(without - with_less, (1750 - 825) * (686 + 33) / 825)


@pytest.mark.parametrize(
    "prior", [MemoryPrior(), MemoryPrior(loop=LoopPreset.TUNED), GraphPrior("step_time_ms")]
)
def test_priors_are_restored_from_tensors_and_damage_is_refused(prior, traced):
    shift = np.linspace(-0.5, 0.5, len(prior.log_constants))
    moved = prior.with_constants(prior.log_constants + shift)
    again = type(prior).from_tensors(moved.tensors())
    np.testing.assert_array_equal(again.log_values(traced[0]), moved.log_values(traced[0]))
    with pytest.raises(ValueError, match="finite constants"):
        type(prior).from_tensors({**moved.tensors(), "log_constants": torch.zeros(2)})


def test_a_head_needs_no_label_at_all(traced):
    workloads, _ = traced
    none = Targets(np.zeros(0), np.zeros(0), [])
    head = Ours(MemoryPrior()).fit([], none, np.random.default_rng(0))
    estimate = head.predict(workloads)
    np.testing.assert_allclose(estimate.median, np.exp(MemoryPrior().log_values(workloads)))
    assert np.all((estimate.low < estimate.median) & (estimate.median < estimate.high))
    again = Head.from_tensors(MemoryPrior, head.tensors())
    np.testing.assert_array_equal(again.predict(workloads).high, estimate.high)
