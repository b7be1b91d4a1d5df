"""The life of assignments under any order of turns, results, losses, orders and changes of owner.

A small model of what should be true runs in parallel to the store, which is asked as a campaign
asks it: by its owner, a turn at a time. Hypothesis looks for an order of events after which the two
differ.
"""

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_samples import DEVICE, ENVIRONMENT, campaign_with, configuration, measurement, owned

from trappm.profiler.records import Outcome
from trappm.store import CampaignState, NotOwnerError
from trappm.store.owners import OwnedError

MAX_ATTEMPTS = 3
LIMIT = {"unstable": 3, "error": 3, "timeout": 2}

_runs = itertools.count()


def assignment_machine(store):
    class AssignmentMachine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.environment = {**ENVIRONMENT, "torch": f"run {next(_runs)}"}  # labels of its own
            self.campaign_id = campaign_with(store, [configuration(b) for b in (1, 2, 3)])
            self.owners = itertools.count()
            self.owner_id, self.dead = f"owner {next(self.owners)}", None
            self.mine = owned(store, self.campaign_id, self.owner_id)
            self.order = [a.id for a in store.assignments.of_campaign(self.campaign_id)]
            self.state = dict.fromkeys(self.order, "open")
            self.failures = dict.fromkeys(self.order, 0)
            self.workers = itertools.count()
            self.held = {}
            """The current lease of each leased assignment."""
            self.old = []
            """Leases that were lost, whose measurement may still come in."""
            self.handed_in = []
            self.labels = set()

        def fail(self, id_, limit):
            self.failures[id_] += 1
            self.state[id_] = "open" if self.failures[id_] < limit else "failed"
            self.old.append(self.held.pop(id_))

        def result_of(self, lease, outcome):
            return measurement(
                lease.configuration,
                outcome,
                attempt_key=lease.attempt_key,
                environment=self.environment,
            )

        def turn(self, results, count):
            """Records and leases so many, and has the model know of it."""
            handed_in = [(result, lease.id) for result, lease in results]
            self.mine.measurements.record(handed_in, max_attempts=MAX_ATTEMPTS)
            self.handed_in += [(result, lease.id) for result, lease in results]
            for _ in range(count):
                waiting = [i for i in self.order if self.state[i] == "open"]
                following = min(waiting, key=lambda i: (self.failures[i], self.order.index(i)))
                worker = f"w{next(self.workers)}"
                lease = self.mine.assignments.lease_next(self.campaign_id, DEVICE, worker)
                assert lease.id == following
                self.held[lease.id] = lease
                self.state[lease.id] = "leased"

        def settle(self, lease, outcome, *, is_late=False):
            if outcome == "ok" and self.state[lease.id] != "done":  # what is done stays as it is
                self.labels.add(lease.id)
            if outcome not in LIMIT:
                self.state[lease.id] = "done"
                held = self.held.pop(lease.id, None)
                if is_late and held is not None:  # its other worker may hand in, too
                    self.old.append(held)
            elif not is_late:
                self.fail(lease.id, LIMIT[outcome])
                self.old.pop()  # its measurement has come in

        @rule(data=st.data(), outcome=st.sampled_from([o.value for o in Outcome]))
        def take_a_turn(self, data, outcome):
            """Some results come in, some of what waits is given out, both in one transaction."""
            few = {"unique": True, "max_size": 2}
            ended = (
                data.draw(st.lists(st.sampled_from(sorted(self.held)), **few)) if self.held else []
            )
            waiting = [i for i in self.order if self.state[i] == "open"]
            count = data.draw(st.integers(0, min(2, len(waiting))))
            results = [(self.result_of(self.held[i], outcome), self.held[i]) for i in ended]
            for _, lease in results:
                self.settle(lease, outcome)
            self.turn(results, count if self.state else 0)

        @precondition(lambda self: "open" not in self.state.values())
        @rule()
        def what_is_not_open_is_given_to_nobody(self):
            worker = f"w{next(self.workers)}"
            assert self.mine.assignments.lease_next(self.campaign_id, DEVICE, worker) is None

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def lose(self, data):
            id_ = data.draw(st.sampled_from(sorted(self.held)))
            after = self.mine.assignments.lose(id_, "lost")
            self.state[id_] = after.state
            self.old.append(self.held.pop(id_))

        def interrupted(self):
            for id_, lease in self.held.items():
                self.state[id_] = "open"
                self.old.append(lease)
            self.held = {}

        @rule()
        def be_paused_and_resumed(self):
            store.owners.stop_campaign(self.campaign_id, CampaignState.PAUSED)
            assert self.mine.campaigns.state(self.campaign_id) == "paused"
            assert (
                self.mine.owners.end_campaign(self.campaign_id, CampaignState.FAILED, "")
                == "paused"
            )
            assert not self.mine.owners.finish_campaign(self.campaign_id, "", None)
            self.mine = owned(store, self.campaign_id, self.owner_id, gone=self.owner_id)
            self.interrupted()

        @rule()
        def be_taken_over(self):
            """From now on all that the one before hands in is refused."""
            self.dead = self.mine
            before, self.owner_id = self.owner_id, f"owner {next(self.owners)}"
            with pytest.raises(OwnedError, match="runs on host owner"):
                owned(store, self.campaign_id, self.owner_id)
            self.mine = owned(store, self.campaign_id, self.owner_id, gone=before)
            self.mine.assignments.release_leases(self.campaign_id)
            self.interrupted()

        @precondition(lambda self: self.dead)
        @rule(data=st.data())
        def the_dead_one_writes(self, data):
            first_id = self.order[0]
            late = [(self.result_of(self.old[-1], "ok"), self.old[-1].id)] if self.old else []
            dead = self.dead
            writes = [
                lambda: dead.measurements.record(late),
                lambda: dead.assignments.lease_next(self.campaign_id, DEVICE, "ghost"),
                lambda: dead.assignments.lose(first_id, "ghost"),
                lambda: dead.assignments.release_leases(self.campaign_id),
                lambda: dead.campaigns.log_event(self.campaign_id, "ghost", {}),
                lambda: dead.owners.end_campaign(self.campaign_id, CampaignState.FAILED, "ghost"),
                lambda: dead.owners.finish_campaign(self.campaign_id, "ghost", None),
                lambda: dead.campaigns.state(self.campaign_id),
                lambda: dead.rounds.close(self.campaign_id, 0, {}),
            ]
            with pytest.raises(NotOwnerError, match="was taken over by host owner"):
                data.draw(st.sampled_from(writes))()

        @precondition(lambda self: self.old)
        @rule(outcome=st.sampled_from(["ok", "error"]))
        def come_in_late(self, outcome):
            lease = self.old.pop()
            result = self.result_of(lease, outcome)
            self.settle(lease, outcome, is_late=True)
            self.turn([(result, lease)], 0)

        @precondition(lambda self: self.handed_in)
        @rule(data=st.data())
        def hand_in_again(self, data):
            result, id_ = data.draw(st.sampled_from(self.handed_in))
            self.mine.measurements.record([(result, id_)])

        @invariant()
        def store_and_model_agree(self):
            rows = store.assignments.of_campaign(self.campaign_id)
            assert {a.id: a.state for a in rows} == self.state
            assert {a.id: a.failures for a in rows} == self.failures
            assert {a.id for a in rows if a.worker} == self.held.keys()
            assert store.campaigns.get(self.campaign_id).owner.id == self.owner_id
            done = {label.configuration for label in store.labels.of_campaign(self.campaign_id)}
            assert done == {a.configuration for a in rows if a.id in self.labels}
            counts = store.campaigns.outcome_counts(self.campaign_id).get(DEVICE, {})
            assert sum(counts.values()) == len(self.handed_in)

    return AssignmentMachine


def test_assignments_follow_the_model(store, database_url):
    run_state_machine_as_test(
        assignment_machine(store),
        settings=settings(
            max_examples=20 if database_url.startswith("sqlite") else 3,  # a server takes longer
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
