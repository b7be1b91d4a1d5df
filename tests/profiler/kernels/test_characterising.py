"""Timing kernels in processes apart, with kernels that fail in every way that they may."""

import dataclasses
import json
from collections import Counter

import pytest
from filelock import FileLock
from kernel_faults import faulty

from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.kernels.characterising import Characteriser
from trappm.profiler.kernels.kernel_call import KernelCall, KernelMeasurement, Operator
from trappm.profiler.measuring.attempt import WORKER
from trappm.profiler.records import Outcome

GOOD = [
    KernelCall.of(Operator.LINEAR, batch=1, rows=8, inputs=16, outputs=16),
    KernelCall.of(Operator.COPY, batch=4, width=256),
    KernelCall.of(Operator.LAUNCH, kernels=10),
]
RUN = "kernel_faults:prepare"
TIMED = (Outcome.OK, Outcome.UNSTABLE)
"""The machine that tests run on may be busy."""


def by_call(results):
    return {result.call: result for result in results}


@pytest.fixture(scope="module")
def lock_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("locks")


@pytest.fixture(scope="module")
def timed(lock_dir):
    """Times calls, of which some fail; all by one warm process."""
    with Characteriser(lock_dir=lock_dir, run=RUN, kernel_timeout_s=2.0) as characteriser:

        def timed(calls, **settings):
            return characteriser.characterise("cpu-1t", calls=calls, **settings)

        yield timed


def test_every_call_has_samples_and_a_time(timed):
    heard = []
    results = timed(GOOD, on_result=lambda result, count: heard.append((result, count)))
    assert heard == [(result, len(GOOD)) for result in results]
    assert by_call(results).keys() == set(GOOD)
    for result in results:
        assert result.outcome in TIMED
        assert len(result.samples_ms) >= result.protocol.min_steps
        assert min(result.samples_ms) <= result.time_ms <= max(result.samples_ms)
        assert result.environment["device"] == result.device == "cpu-1t"
        assert {"threads", "cpu_model", "torch", "cache_bytes"} <= {*result.environment}
        assert {"window_s", "lost_cpu_share"} <= {*result.facts}
        assert KernelMeasurement.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_missing_power_has_a_reason(timed):
    for result in timed(GOOD[:1]):
        assert (result.power_w is None) == ("power_w" in result.missing)
        assert (result.energy_j is None) == ("energy_j" in result.missing)


@pytest.mark.parametrize(
    ("width", "outcome", "message"),
    [
        (11, Outcome.ERROR, "ValueError: a kernel's own mistake"),
        (12, Outcome.UNSUPPORTED, "not implemented for 'Half'"),
        (13, Outcome.OOM, "memory"),
        (14, Outcome.ERROR, "killed by SIGSEGV"),
        (15, Outcome.TIMEOUT, "killed after 2 s"),
    ],
)
def test_a_failing_kernel_is_an_outcome_and_the_others_continue(timed, width, outcome, message):
    bad = faulty(width)
    results = timed([GOOD[0], bad, *GOOD[1:]])
    ended = by_call(results)
    assert ended.keys() == {bad, *GOOD}
    assert ended[bad].outcome is outcome
    assert message in ended[bad].message
    assert ended[bad].failed_in in {"warmup", "measure"}
    assert ended[bad].environment["device"] == "cpu-1t"
    assert all(ended[call].outcome in TIMED for call in GOOD)


def test_calls_beyond_the_time_limit_are_reported(timed):
    slow = [dataclasses.replace(faulty(16), sizes=(batch, 16)) for batch in range(1, 9)]
    results = by_call(timed(slow, seconds=0.5))
    outcomes = Counter(result.outcome for result in results.values())
    assert results.keys() == set(slow)
    assert outcomes[Outcome.TIMEOUT] >= 1
    for result in results.values():
        if result.outcome is Outcome.TIMEOUT:
            assert "were over" in result.message
            assert result.time_ms is None


def test_a_device_that_keeps_failing_is_abandoned(timed):
    bad = [dataclasses.replace(faulty(14), sizes=(batch, 14)) for batch in range(1, 14)]
    results = timed(bad)
    assert [result.outcome for result in results] == [Outcome.ERROR] * len(bad)
    assert results[-1].failed_in == WORKER
    assert "left out" in results[-1].message


def test_a_device_that_cannot_start_is_an_error(lock_dir):
    with (
        Characteriser(lock_dir=lock_dir, run="no_such_module:prepare") as characteriser,
        pytest.raises(TrappmError, match=r"cannot be timed.*no_such_module"),
    ):
        characteriser.characterise("cpu-1t", calls=GOOD)


@pytest.mark.parametrize("device", ["simulated:a100", "cpu-9999t"])
def test_devices_that_run_no_kernels_are_refused(device, lock_dir):
    with Characteriser(lock_dir=lock_dir) as characteriser, pytest.raises(InputError):
        characteriser.characterise(device, calls=GOOD)


def test_a_device_in_use_is_reported(lock_dir):
    with (
        FileLock(lock_dir / "cpu.lock"),
        Characteriser(lock_dir=lock_dir, lock_timeout_s=0.1) as characteriser,
        pytest.raises(TrappmError, match="another measurement"),
    ):
        characteriser.characterise("cpu-1t", calls=GOOD)
