"""Ratios of compiled to eager steps: learned from pairs, and judged on other architectures."""

import math

import numpy as np
import pytest

from trappm.learner.interface import CompiledPair, Workload
from trappm.learner.physics.compiled_step import (
    PARTS,
    CompiledStep,
    family_offsets,
    reference_offsets,
    times_of_pairs,
)
from trappm.learner.snapshots.compiled_ratios import fit_compiled_ratios
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Execution, Graph, Phase
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import TraceSettings

NAMES = ("resnet10t", "test_vit", "test_convnext", "test_efficientnet", "test_resnet", "test_vit2")
STEP = CompiledStep(np.linspace(-0.4, 0.4, len(PARTS)))


@pytest.fixture(scope="module")
def workloads():
    """Steps of each model at two batch sizes, by an id."""
    steps = {}
    for name in NAMES:
        for how in Execution:
            step = trace(name, 64, TraceSettings(execution=how))
            for batch_size in (8, 64):
                steps[f"{name} {batch_size} {how}"] = Workload(
                    graph=Graph.empty(batch_size), phase=Phase.TRAIN, trace=step,
                    kernels=step.kernels,
                )  # fmt: skip
    return steps


def pairs_of(workloads, log_ratio, names=NAMES, held_out=()):
    """Pairs of models whose ratio is `log_ratio` of eager and compiled step."""
    return [
        CompiledPair(
            device="cpu-2t",
            phase=Phase.TRAIN,
            is_held_out=name in held_out,
            eager=(eager := f"{name} {batch_size} eager"),
            compiled=(compiled := f"{name} {batch_size} compile"),
            log_ratio=log_ratio(name, workloads[eager], workloads[compiled]),
        )
        for name in names
        for batch_size in (8, 64)
    ]


def of_step(name, eager, compiled):
    """The ratio by a device's own constants, with the reference's addition for the family."""
    parts, log_eager = times_of_pairs([eager], [compiled])
    added = reference_offsets().get(family_of(name), 0.0)
    return float(STEP.log_times(parts)[0] - log_eager[0]) + added


def ratio_of(pairs, workloads):
    names = {name: name.split()[0] for name in workloads}
    families = {name: family_of(architecture) for name, architecture in names.items()}
    ratios, lines = fit_compiled_ratios(pairs, workloads, families, names)
    return ratios["cpu-2t"][Phase.TRAIN], lines[0]


def test_a_device_that_follows_its_kernels_is_learned_from_them(workloads):
    pairs = pairs_of(workloads, of_step, held_out=NAMES[-1:])
    ratio, line = ratio_of(pairs, workloads)
    assert len(ratio.constants) == len(PARTS)
    assert ratio.pairs == 10
    errors = []
    for pair in pairs[-2:]:
        parts, eager = times_of_pairs([workloads[pair.eager]], [workloads[pair.compiled]])
        step = CompiledStep(np.array(ratio.constants))
        added = ratio.families.get(family_of(pair.eager.split()[0]), 0.0)
        errors.append(float(step.log_times(parts)[0] - eager[0] + added - pair.log_ratio))
    median = [ratio.log_ratio - pair.log_ratio for pair in pairs[-2:]]
    assert np.abs(errors).max() < np.abs(median).max()
    assert f"mean error {np.abs(np.expm1(errors)).mean():.0%} on 2 held-out pairs" in line
    assert "fused kernels of 10 pairs" in line


def test_few_pairs_of_a_family_count_less():
    offsets = family_offsets(np.array([0.4, 0.2, 0.4, 0.4]), ["a", "b", "a", "a"])
    assert offsets == {"a": pytest.approx(0.3), "b": pytest.approx(0.1)}


def test_a_device_with_one_ratio_has_the_median(workloads):
    ratio, line = ratio_of(pairs_of(workloads, lambda *_: math.log(0.5)), workloads)
    assert ratio.constants == ()
    assert (ratio.log_ratio, ratio.log_error) == (pytest.approx(math.log(0.5)), 0.0)
    assert "takes 0.50 times the eager one (by the median of 12 pairs)" in line


def test_one_architecture_and_steps_without_kernels_have_a_ratio(workloads):
    pairs = pairs_of(workloads, of_step, NAMES[:1])
    assert ratio_of([*pairs, *pairs], workloads)[0].log_error > 0
    few = pairs_of(workloads, of_step, NAMES[:2])[:3]  # without one model a single pair is left
    assert ratio_of(few, workloads)[0].log_error > 0
    bare = {name: Workload(graph=w.graph, phase=w.phase) for name, w in workloads.items()}
    assert ratio_of([*pairs, *pairs], bare)[0].constants == ()
    name = pairs[0].compiled
    some = {**workloads, name: bare[name]}
    several = pairs_of(workloads, of_step)
    known = ratio_of(several, some)[0]
    assert (known.pairs, len(known.constants)) == (len(several) - 1, len(PARTS))
