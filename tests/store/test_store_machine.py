"""The life of assignments under any order of leases, results, losses and interruptions.

A small model of what should be true runs beside the store; hypothesis looks for an order of events
after which the two differ.
"""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_samples import DEVICE, ENVIRONMENT, campaign_with, configuration, measurement

from trappm.profiler.records import Outcome

MAX_ATTEMPTS = 3
LIMIT = {"unstable": 3, "error": 3, "timeout": 2}

_runs = itertools.count()


def assignment_machine(store):
    class AssignmentMachine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.environment = {**ENVIRONMENT, "torch": f"run {next(_runs)}"}  # labels of its own
            self.campaign_id = campaign_with(store, [configuration(b) for b in (1, 2, 3)])
            self.order = [a.id for a in store.assignments(self.campaign_id)]
            self.state = dict.fromkeys(self.order, "open")
            self.failures = dict.fromkeys(self.order, 0)
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

        def hand_in(self, lease, outcome):
            result = measurement(
                lease.configuration,
                outcome,
                attempt_key=lease.attempt_key,
                environment=self.environment,
            )
            assert store.record(result, assignment_id=lease.id).is_new
            self.handed_in.append((result, lease.id))
            if outcome == "ok" and self.state[lease.id] != "done":  # what is done stays as it is
                self.labels.add(lease.id)

        @rule()
        def lease(self):
            lease = store.lease(self.campaign_id, DEVICE, "w", 60, max_attempts=MAX_ATTEMPTS)
            opened = [i for i in self.order if self.state[i] == "open"]
            assert (lease and lease.id) == min(opened, key=self.failures.get, default=None)
            if lease is not None:
                self.held[lease.id], self.state[lease.id] = lease, "leased"

        @precondition(lambda self: self.held)
        @rule(data=st.data(), outcome=st.sampled_from([o.value for o in Outcome]))
        def finish(self, data, outcome):
            id_ = data.draw(st.sampled_from(sorted(self.held)))
            self.hand_in(self.held[id_], outcome)
            if outcome in LIMIT:
                self.fail(id_, LIMIT[outcome])
                self.old.pop()  # its measurement has come in
            else:
                self.state[id_] = "done"
                del self.held[id_]

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def lose(self, data):
            id_ = data.draw(st.sampled_from(sorted(self.held)))
            store.give_up_lease(id_, "lost", max_attempts=MAX_ATTEMPTS)
            self.fail(id_, MAX_ATTEMPTS)

        @rule()
        def interrupt(self):
            assert store.release_leases(self.campaign_id) == len(self.held)
            for id_, lease in self.held.items():
                self.state[id_] = "open"
                self.old.append(lease)
            self.held = {}

        @rule()
        def reopen(self):
            given_up = [i for i in self.order if self.state[i] == "failed"]
            assert store.reopen_failed(self.campaign_id) == len(given_up)
            self.state |= dict.fromkeys(given_up, "open")
            self.failures |= dict.fromkeys(given_up, 0)

        @precondition(lambda self: self.old)
        @rule(outcome=st.sampled_from(["ok", "error"]))
        def come_in_late(self, outcome):
            lease = self.old.pop()
            self.hand_in(lease, outcome)
            if outcome == "ok":
                self.state[lease.id] = "done"
                if lease.id in self.held:  # its other worker does it in vain, and may hand in too
                    self.old.append(self.held.pop(lease.id))

        @precondition(lambda self: self.handed_in)
        @rule(data=st.data())
        def hand_in_again(self, data):
            result, id_ = data.draw(st.sampled_from(self.handed_in))
            assert not store.record(result, assignment_id=id_).is_new

        @invariant()
        def store_and_model_agree(self):
            rows = store.assignments(self.campaign_id)
            assert {a.id: a.state for a in rows} == self.state
            assert {a.id: a.failures for a in rows} == self.failures
            done = {label.configuration for label in store.campaign_labels(self.campaign_id)}
            assert done == {a.configuration for a in rows if a.id in self.labels}
            counts = store.outcome_counts(self.campaign_id).get(DEVICE, {})
            assert sum(counts.values()) == len(self.handed_in)

    return AssignmentMachine


def test_assignments_live_as_the_model_says(store):
    run_state_machine_as_test(
        assignment_machine(store),
        settings=settings(
            max_examples=25,
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
