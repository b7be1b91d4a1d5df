"""Collectives between real ranks, timed over gloo: every call has an outcome, as kernels have."""

import os

import psutil
import pytest

from trappm.extensions.parallel.ranks_device import collectives
from trappm.profiler.errors import InputError
from trappm.profiler.kernels.characterising import Characteriser
from trappm.profiler.kernels.kernel_call import KernelCall, Operator
from trappm.profiler.records import Outcome

TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
OPERATORS = (Operator.ALL_REDUCE, Operator.ALL_GATHER, Operator.REDUCE_SCATTER)
SMALL, LARGE = (
    [KernelCall.of(operator, ranks=2, elements=elements) for operator in OPERATORS]
    for elements in (256, 1 << 20)
)
TIMED = (Outcome.OK, Outcome.UNSTABLE)
"""The machine that tests run on may be busy."""


@pytest.fixture(scope="module")
def characteriser(tmp_path_factory):
    with Characteriser(lock_dir=tmp_path_factory.mktemp("locks")) as characteriser:
        yield characteriser


@TWO_CORES
def test_two_ranks_time_collectives(characteriser):
    results = characteriser.characterise("cpu-2x1t", calls=[*SMALL, *LARGE], seconds=2)
    by_call = {result.call: result for result in results}
    assert by_call.keys() == {*SMALL, *LARGE}
    for result in results:
        assert result.outcome in TIMED, result.message
        assert result.device == "cpu-2x1t"
        assert min(result.samples_ms) <= result.time_ms <= max(result.samples_ms)
        assert (result.environment["world_size"], result.environment["collectives"]) == (2, "gloo")
        assert len(set(result.environment["pinned_cores"])) == 2
        assert "energy_j" in result.missing


@TWO_CORES
def test_killed_rank_fails_only_its_collective(characteriser):
    killed = []

    def kill(result, count):
        del count
        if not killed:  # while the next one is timed
            ranks = [
                child
                for child in psutil.Process().children(recursive=True)
                if child.parent().parent().pid != os.getpid() and not child.children()
            ]
            killed.append(ranks[-1])
            ranks[-1].kill()

    results = characteriser.characterise("cpu-2x1t", calls=SMALL, seconds=30, on_result=kill)
    assert killed
    outcomes = [result.outcome for result in results]
    assert {result.call for result in results} == {*SMALL}
    assert outcomes.count(Outcome.ERROR) <= 1
    failed = [result for result in results if result.outcome is Outcome.ERROR]
    assert [m for m in (result.message for result in failed) if "SIGKILL" not in m] == []


@TWO_CORES
def test_failing_collective_is_recorded_as_an_outcome(characteriser):
    three = KernelCall.of(Operator.ALL_REDUCE, ranks=3, elements=3)
    alone = KernelCall.of(Operator.COPY, batch=4, width=256)
    results = characteriser.characterise("cpu-2x1t", calls=[three, alone, SMALL[0]], seconds=10)
    by_call = {result.call: result for result in results}
    assert by_call[three].outcome is by_call[alone].outcome is Outcome.UNSUPPORTED
    assert "not a collective of 2 ranks" in by_call[three].message
    assert by_call[SMALL[0]].outcome in TIMED


@TWO_CORES
def test_links_do_not_depend_on_the_strategy(characteriser):
    with pytest.raises(InputError, match="same links as cpu-2x1t"):
        characteriser.characterise("cpu-2x1t-fsdp")


def test_collectives_range_from_one_kibibyte_to_the_memory_limit():
    calls = collectives(3, memory_mib=16 * 1024)
    assert {call.operator for call in calls} == {*OPERATORS}
    sizes = sorted({4 * call["elements"] for call in calls})
    assert (round(sizes[0], -2), len(calls)) == (1000, 3 * 19)
    assert sizes[-1] == pytest.approx(256 << 20, rel=1e-3)
    assert max(4 * call["elements"] for call in collectives(2, memory_mib=64)) <= 4 << 20
    assert all(call["elements"] % 3 == 0 for call in calls)
