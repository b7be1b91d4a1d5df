"""Hosts whose cores other programs use: pauses that grow, and attempts that are spread out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from campaign_crew import made_up
from virtual_cluster import Desk, Ledger, VirtualCluster, Weather, waiting

from trappm.cluster.campaign.loop import others_share
from trappm.cluster.campaign.progress import quiet_line
from trappm.cluster.scheduler.messages import (
    AwaitQuiet,
    Close,
    Course,
    Measure,
    Quarantine,
    Tick,
    Worker,
)
from trappm.cluster.scheduler.queues import QuietWatch
from trappm.profiler.records import Configuration, Outcome, Protocol

WORKER = Worker("w", "cpu-2t", "host", "stack")
OTHER = Worker("v", "cpu-2t", "another host", "stack")
COURSE = Course(
    devices=("cpu-2t",),
    shares={"cpu-2t": [4, 4, 2, 2]},
    max_attempts=3,
    keeps_host_quiet=True,
)


def pauses_of(attempts: list[float | None], *, each_s: float = 5.0) -> list[AwaitQuiet | None]:
    watch = QuietWatch()
    return [watch.note(WORKER, share, number * each_s) for number, share in enumerate(attempts)]


def test_pauses_of_a_busy_host_grow() -> None:
    pauses = [pause for pause in pauses_of([0.48] * 60) if pause]
    assert [pause.seconds for pause in pauses[:5]] == [20, 40, 80, 120, 120]
    assert (pauses[1].unstable, pauses[1].attempts) == (12, 12)
    assert pauses[-1].attempts == 20


def test_few_unstable_attempts_cause_no_pause() -> None:
    assert not any(pauses_of([0.4] * 5))
    assert not any(pauses_of([None, None, 0.4] * 20))


def test_pauses_are_short_again_after_a_quiet_time() -> None:
    found = [pause for pause in pauses_of([0.4] * 12 + [None] * 20 + [0.4] * 20) if pause]
    assert [pause.seconds for pause in found[:3]] == [20, 40, 20]


def test_nothing_begins_on_a_host_in_its_pause() -> None:
    watch = QuietWatch()
    for _ in range(6):
        watch.note(WORKER, 0.5, 100.0)
    assert watch.is_paused("host", 119.0)
    assert not watch.is_paused("host", 120.0)
    assert not watch.is_paused("another host", 110.0)


NOISY = "noise: the interquartile range is 31% of a step"
CONTENDED = "contention: others had its cores for 26% of the time"
OVERFLOWED = "3 optimizer steps were left out, as gradients overflowed"


@pytest.mark.parametrize(
    ("device", "message", "share", "counted"),
    [
        ("cpu-2t", CONTENDED, 0.03, 0.03),
        ("cpu-2t", f"{NOISY}; {CONTENDED}", 0.48, 0.48),
        ("cpu-2t", NOISY, 0.3, 0.3),
        ("cpu-2t", "drift: steps of the second half were longer by 22% of the median", 0.3, 0.3),
        ("cpu-2t", OVERFLOWED, 0.004, None),
        ("cpu-2t", OVERFLOWED, 0.3, None),
        ("cpu-2t", NOISY, 0.004, None),  # another virtual machine or hyperthread
        ("cpu-2t", CONTENDED, 0.004, None),  # the pause would report 0 %
        ("cpu-2t", CONTENDED, None, None),
        ("cpu-2t", None, 0.3, None),
        ("a100", CONTENDED, 0.3, None),
    ],
)
def test_only_runs_that_other_programs_made_unstable_start_a_pause(
    device: str, message: str | None, share: float | None, counted: float | None
) -> None:
    what = Configuration(architecture="resnet18", batch_size=1, input_size=64)
    unstable = made_up(what, device, Protocol(name="quick"), "key", outcome="unstable")
    environment = {**unstable.environment, "others_cpu_share": share}
    unstable = replace(unstable, message=message, environment=environment)
    assert others_share(unstable) == counted
    assert any(pauses_of([others_share(unstable)] * 6)) == (counted is not None)
    assert others_share(replace(unstable, outcome=Outcome.OK)) is None


def test_a_pause_is_one_sentence_with_the_share_of_the_cores() -> None:
    assert quiet_line(AwaitQuiet(WORKER, 20.0, 12, 20, 0.48), "this machine's") == (
        "Other programs use 48% of this machine's cores; 12 of the last 20 runs were unstable. "
        "Waiting 20 s for quiet."
    )


def played(unstable, **so_far):
    """A desk whose only worker finds these assignments unstable, each this number of times.

    Ticks pass until it has begun something, and until the campaign is over.
    """
    desk, left = Desk(COURSE, [WORKER], **so_far), dict(unstable)
    while not desk.machine.is_over and desk.now < 1e5:
        for id_ in desk.doing().values():
            is_bad = left.get(id_, 0) > 0
            left[id_] = left.get(id_, 0) - 1
            desk.measured("w", "unstable" if is_bad else "ok", 0.5 if is_bad else None)
        desk.tell(Tick(), 1.0)
    return desk


def ids(desk, kind):
    """Assignments that were measured or given up, or rounds that were closed."""
    names = {Measure: "assignment_id", Close: "round_number"}
    found = [command for command in desk.commands if isinstance(command, kind)]
    return [getattr(command, names[kind]) for command in found]


def quarantined(desk):
    return sorted(c.assignment.id for c in desk.commands if isinstance(c, Quarantine))


def test_attempts_at_a_configuration_are_spread_over_rounds() -> None:
    desk = played({"cpu-2t/1/0": 2})
    starts = ids(desk, Measure)
    at = [i for i, start in enumerate(starts) if start == "cpu-2t/1/0"]
    assert len(at) == 3
    assert [starts[i - 1].split("/")[1] for i in at[1:]] == ["2", "3"]  # behind later rounds
    assert all(later - earlier > 2 for earlier, later in pairwise(at))
    assert ids(desk, Close) == [0, 1, 2, 3]
    assert not quarantined(desk)


def test_an_unstable_configuration_has_all_its_attempts() -> None:
    desk = played({"cpu-2t/0/1": 99, "cpu-2t/3/0": 99})
    starts = ids(desk, Measure)
    for id_ in ("cpu-2t/0/1", "cpu-2t/3/0"):
        assert starts.count(id_) == COURSE.max_attempts
    assert quarantined(desk) == ["cpu-2t/0/1", "cpu-2t/3/0"]


def test_a_resumed_campaign_measures_deferred_assignments() -> None:
    """Its own round is closed in the store; the next one is not planned yet."""
    late = waiting("cpu-2t/1/0", "cpu-2t", 1, 0, failures=1)
    desk = played({}, waiting=[late], next_rounds={"cpu-2t": 2}, closed=[0, 1])
    parts = [id_.removeprefix("cpu-2t/") for id_ in ids(desk, Measure)]
    assert parts == ["2/0", "2/1", "1/0", "3/0", "3/1"]
    assert ids(desk, Close) == [2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_a_campaign_on_a_busy_host_ends_within_its_budget(seed: int) -> None:
    weather = Weather(measuring_s=5.0, learning_s=5.0, failing=0.6)
    generator = np.random.default_rng(seed)
    played = VirtualCluster(COURSE, {"cpu-2t": (1, 1)}, weather, generator, ledger=Ledger()).run()
    assert played.machine.is_over
    assert sorted(played.ledger.closed) == [0, 1, 2, 3]
    assert set(played.ledger.state.values()) <= {"done", "failed"}
