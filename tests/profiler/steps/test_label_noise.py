"""Noise of step times, on samples and traces of an H100 (`examples/data/h100`)."""

import collections
import json
import lzma
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trappm.profiler.records import Measurement, Outcome
from trappm.profiler.steps.sampling import (
    of_two_processes,
    relative_error,
    relative_error_of_batches,
)

H100 = Path(__file__).parents[3] / "examples/data/h100"


@pytest.fixture(scope="module")
def measured():
    """Measurements with samples by configuration, one or two each."""
    found = collections.defaultdict(list)
    for name in ("first", "check"):
        with lzma.open(H100 / f"sweeps/{name}.jsonl.xz", "rt") as lines:
            for line in lines:
                measurement = Measurement.from_dict(json.loads(line))
                if measurement.step_samples_ms:
                    found[measurement.configuration].append(measurement)
    return found


def test_batches_of_correlated_samples_have_larger_errors():
    draw = np.random.default_rng(0)
    independent = draw.normal(10, 1, 480)
    correlated = np.repeat(draw.normal(10, 1, 12), 40)
    error = relative_error_of_batches(independent)
    assert error == pytest.approx(relative_error(independent), rel=0.7)
    assert relative_error_of_batches(correlated) > 3 * relative_error(correlated)
    few = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
    assert relative_error_of_batches(few) == relative_error(few)


def test_labels_of_two_processes_have_the_noise_between_them(measured):
    first, again = next(
        pair for pair in measured.values() if pair[0].configuration.architecture == "mnasnet_100"
        and len(pair) == 2 and {each.outcome for each in pair} == {Outcome.OK}
        and pair[0].configuration.batch_size == 32
    )  # fmt: skip
    facts = {**first.environment, "step_time_relative_error": 0.02}
    first = replace(first, environment=facts)
    both = of_two_processes(first, again)
    low_ms, high_ms = sorted(both.environment["process_medians_ms"])
    assert low_ms < both.step.median_ms < high_ms
    noise = both.environment["step_time_relative_error"]
    assert noise == pytest.approx(math.log(high_ms / low_ms) / 2)
    assert noise > 0.05
    count = min(len(first.step_samples_ms), len(again.step_samples_ms))
    assert len(both.step_samples_ms) == 2 * count
    assert both.step.forward_share == first.step.forward_share
    assert (both.memory_mib, both.power_w) == (first.memory_mib, first.power_w)
    assert both.duration_s == first.duration_s + again.duration_s
    alone = of_two_processes(first, replace(again, outcome=Outcome.UNSTABLE, message="noise"))
    assert alone.step == first.step
    assert alone.environment["second_process"] == "unstable: noise"
