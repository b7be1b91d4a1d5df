"""The campaign loop: what happens next, from an empty pool to a published snapshot.

    pool -> graphs -> encoder -> round 0: evaluation set     (uniform, architectures held out)
                              -> round 1: initial draw       (uniform)
                              -> rounds 2..: acquired        (uncertainty and diversity)
                                 after each of 1..: heads are trained and judged on round 0
                              -> snapshot

SQL is the truth: the loop keeps nothing in memory that it could not read back, so that a campaign
killed at any moment goes on from the last recorded measurement. Workers whose canary says that they
are no longer what they were measure no more. It knows no Ray: a `Crew` measures
and a `Learner` learns, and on a CPU device never both at once, since they share the cores.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster.budget import check_budget, pool_of, without_refused
from cluster.canaries import Canaries
from cluster.crew import CanaryCheck, Crew, Finished, Learner, OnProgress, TrainingLabel, Worker
from cluster.progress import Pace, Progress, measurement_line, round_line
from cluster.rehearsal import rehearsal_line, unfit_to_publish
from cluster.spec import CampaignSpec
from profiler.errors import CampaignError, StoreError
from profiler.records import METRICS, Configuration
from store import PlannedAssignment, Store

LEASE_S = 900.0
"""Longer than any measurement; the leases of a campaign that died are released when it resumes."""


class CampaignStopped(Exception):  # noqa: N818  (an order that was obeyed, not an error)
    """The campaign was asked to stop and has put everything down where resume finds it."""


class CanaryStopError(CampaignError):
    """The canary stopped the last worker of a device that is still needed."""


class Campaign:
    """One campaign on its way; `run` returns when it is finished."""

    def __init__(
        self,
        *,
        store: Store,
        campaign_id: str,
        spec: CampaignSpec,
        crew: Crew,
        learner: Learner,
        snapshots: Path,
        watch: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.store = store
        self.id = campaign_id
        self.spec = spec
        self.crew = crew
        self.learner = learner
        self.snapshots = snapshots
        self.protocol = spec.measuring_protocol
        self._watch = watch
        self._progress = Progress()
        self._stop = threading.Event()
        self._pace = Pace(spec)
        self._canaries = Canaries(store, campaign_id, spec.canary)

    def stop(self) -> None:
        """Asks a running campaign to stop; what is being measured is measured again later."""
        self._stop.set()

    def run(self) -> str | None:
        """Runs to the end.

        Returns:
            The snapshot's id; None if its labels are of no hardware, and nothing is published.

        Raises:
            CampaignStopped: `stop` was called; the campaign is paused.
            CanaryStopError: no worker is left that may measure; the campaign is paused.
            TrappmError: the campaign cannot go on; its state says failed, and it can be resumed.
        """
        self.store.set_campaign_state(self.id, "running")
        self._tell(news=rehearsal_line(self.spec.devices.keys))
        try:
            self.store.release_leases(self.id)
            self.store.reopen_failed(self.id)
            self._prepare_pool()
            self._prepare_learner()
            for number in range(2 + self.spec.rounds.count):
                self._round(number)
            unfit = unfit_to_publish(self._labels())
            snapshot_id = None if unfit else self._publish()
        except CampaignStopped:
            for finished in self.crew.wait(timeout_s=0):  # what has come back is not thrown away
                self._take(finished)
            self._end("paused", "stopped on request")
            raise
        except CanaryStopError as stop:
            self._end("paused", str(stop))
            raise
        except Exception as error:
            # If it is the store that fails, its first error is the one to tell.
            with contextlib.suppress(StoreError):
                self._end("failed", str(error))
            raise
        if unfit:
            self._tell(news=f"no snapshot is published: {unfit}")
        self._end("finished", f"no snapshot: {unfit}" if unfit else f"snapshot {snapshot_id}")
        return snapshot_id

    # Preparation: pool, graphs, encoder.

    def _prepare_pool(self) -> None:
        if self.store.campaign_pool(self.id):
            return
        configurations = pool_of(self.spec, self.store)
        self._tell("pool", news=f"pool: {len(configurations)} configurations")
        self._profile_graphs(configurations)
        pool = without_refused(configurations, self.store)
        held_out = check_budget(self.spec, pool)
        self.store.set_campaign_pool(self.id, [(c, c.architecture in held_out) for c in pool])

    def _profile_graphs(self, configurations: Sequence[Configuration]) -> None:
        pairs = sorted({(c.architecture, c.input_size) for c in configurations})
        missing = self.store.pairs_to_profile(pairs)
        self._tell("graphs", done=len(pairs) - len(missing), total=len(pairs))
        for graph in self.crew.profile(missing):
            self._check_stop()
            graph.save(self.store)
            refusal = graph.refusal and f"no graph of {graph.architecture}: {graph.refusal}"
            self._tell(done=self._progress.done + 1, news=refusal)

    def _prepare_learner(self) -> None:
        pool = self.store.campaign_pool(self.id)
        templates = self.store.graph_templates((c.architecture, c.input_size) for c, _ in pool)
        self._tell("encoder", total=0)
        self.learner.set_pool(
            [(c, templates[c.architecture, c.input_size]) for c, _ in pool],
            self._on_progress("encoder"),
        )
        self._tell(news=f"encoder: ready, {len(pool)} configurations embedded")

    # Rounds: plan, measure, learn.

    def _round(self, number: int) -> None:
        known = {r.number: r for r in self.store.rounds(self.id)}
        if number in known and known[number].state == "closed":
            if number == 1 + self.spec.rounds.count or number + 1 not in known:
                self._fit()  # the learner is new in this process and must know its heads again
            return
        if number not in known:
            self._plan(number)
        self._measure(number)
        report = self._fit(number) if number else {}
        if number == 1 and self.spec.devices.source not in report["devices"]:
            outcomes = self.store.outcome_counts(self.id).get(self.spec.devices.source, {})
            told = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            raise CampaignError(
                f"the initial draw gave too few labels on {self.spec.devices.source} to learn from "
                f"(attempts: {told}); when the machine is quiet, go on with: "
                f"trappm campaign resume {self.id}"
            )
        self.store.close_round(self.id, number, report)

    def _plan(self, number: int) -> None:
        purpose = ("evaluation", "initial")[number] if number < 2 else "acquired"
        planned: list[PlannedAssignment] = []
        for device in self.spec.devices.keys:
            planned += list(self._pick(number, purpose, device))
        self.store.plan_round(self.id, number, purpose, planned)

    def _pick(self, number: int, purpose: str, device: str) -> Iterator[PlannedAssignment]:
        share = {"evaluation": self.spec.evaluation, "initial": self.spec.initial}
        count = share.get(purpose, self.spec.rounds).on(device, self.spec.devices)
        assigned = self.store.assignments(self.id, device=device)
        taken = {a.configuration.id for a in assigned}
        pool = self.store.campaign_pool(self.id)
        wants_held_out = purpose == "evaluation"
        candidates = [c for c, held_out in pool if held_out == wants_held_out and c.id not in taken]
        generator = self._generator(number + 1, self.spec.devices.keys.index(device))
        if purpose == "acquired":
            by_id = {c.id: c for c in candidates}
            self._tell("choosing", total=0)
            choices = self.learner.choose(
                device,
                min(count, len(candidates)),
                candidates=list(by_id),
                labelled=sorted(a.configuration.id for a in assigned if a.role == "train"),
                seed=(self.spec.seed, number, self.spec.devices.keys.index(device)),
            )
            picks = [(by_id[c.configuration_id], dict(c.reason)) for c in choices]
        else:
            order = generator.permutation(len(candidates))[:count]
            picks = [(candidates[i], {"strategy": "uniform draw"}) for i in order]
        role = "evaluate" if wants_held_out else "train"
        for rank, (configuration, reason) in enumerate(picks):
            yield PlannedAssignment(
                configuration=configuration, device=device, role=role, rank=rank, reason=reason
            )

    def _measure(self, number: int) -> None:
        """Measures until no assignment is open; on resume only what is still open."""
        adopted: set[str] = set()
        self._show_counts(number)
        while True:
            self._check_stop()
            for worker in self.crew.workers():
                if worker.name not in adopted:
                    adopted.add(worker.name)
                    self._adopt(worker)
            if not self._start_one(number) and not self.crew.running():
                # We hold no lease now: any there is belongs to somebody who died.
                self.store.release_leases(self.id)
                missing = {a.device for a in self.store.assignments(self.id, state="open")}
                if not missing:
                    return
                self._wait_for_workers(missing)
            for finished in self.crew.wait(timeout_s=1.0):
                self._take(finished)
                self._show_counts(number)

    def _adopt(self, worker: Worker) -> None:
        """What was measured before, on the same device and stack, is not measured again."""
        count = self.store.adopt_labels(
            self.id, worker.device, worker.fingerprint, self.protocol.name
        )
        if count:
            self._tell(news=f"{worker.device}: {count} labels taken from earlier campaigns")

    def _start_one(self, number: int) -> bool:
        """Starts the next task; one only, since two devices can share one host."""
        for worker in self.crew.idle():
            if worker in self._canaries.stopped:
                continue
            if self._canaries.is_due(worker) and self._is_needed(worker.device):
                self.crew.start(worker, self._canaries.check(worker), self.protocol)
                self._show_counts(number)
                return True
            assignment = self.store.lease(
                self.id,
                worker.device,
                worker.name,
                LEASE_S,
                max_attempts=self.spec.max_attempts,
            )
            if assignment is not None:
                self._canaries.count_measurement(worker)
                self.crew.start(worker, assignment, self.protocol)
                self._show_counts(number)
                return True
        return False

    def _is_needed(self, device: str) -> bool:
        return bool(self.store.assignments(self.id, device=device, state="open"))

    def _take(self, finished: Finished) -> None:
        worker, task, measurement = finished.worker, finished.task, finished.measurement
        if isinstance(task, CanaryCheck):
            self._tell(news=self._canaries.take(finished))
        elif measurement is None:
            loss = finished.loss or "the worker was lost"
            self._canaries.forget(worker)
            self.store.give_up_lease(task.id, loss, max_attempts=self.spec.max_attempts)
            self._tell(news=f"{task.device}  {task.configuration}  {loss}")
        else:
            self.store.record(
                measurement, assignment_id=task.id, max_attempts=self.spec.max_attempts
            )
            self._pace.measured(measurement.device, measurement.duration_s)
            self._tell(news=measurement_line(measurement))

    def _wait_for_workers(self, missing: set[str]) -> None:
        """Nothing runs and nothing could start, though something is open."""
        lost = sorted(missing - set(self.crew.awaited()))
        stopped = [f"{w.device}: {why}" for w, why in self._canaries.stopped.items()
                   if w.device in lost]  # fmt: skip
        if stopped:
            raise CanaryStopError(
                f"the canary stopped the last worker of {'; '.join(stopped)}; see what became of "
                "its host (other programs, clocks, cooling); go on, beginning with a fresh canary, "
                f"with: trappm campaign resume {self.id}"
            )
        if lost:
            raise CampaignError(
                f"no worker is left for device {', '.join(lost)}; start a node with it "
                f"and go on with: trappm campaign resume {self.id}"
            )
        self._tell(f"waiting for a node with {', '.join(sorted(missing))}", total=0)

    def _fit(self, number: int | None = None) -> dict[str, Any]:
        self._tell("learning", total=0)
        started = time.monotonic()
        report = self.learner.fit(self._labels(), self._on_progress("learning"))
        self._pace.learned(time.monotonic() - started)
        if number is not None:
            self._tell(news=round_line(number, report))
        return report

    def _labels(self) -> list[TrainingLabel]:
        return [
            TrainingLabel(
                configuration_id=label.configuration.id,
                device=label.device,
                role=str(label.role),
                values=tuple(getattr(label, metric) for metric in METRICS),
                provenance=label.provenance,
            )
            for label in self.store.campaign_labels(self.id)
        ]

    def _publish(self) -> str:
        self._tell("publishing", total=0)
        report = self.store.rounds(self.id)[-1].report or {}
        labels = self._labels()
        info = self.learner.publish(
            self.snapshots,
            {
                "campaign": self.id,
                "errors": report.get("devices", {}),
                "split": "whole architectures held out, uniform draw",
                "evaluation_labels": dict(
                    Counter(label.device for label in labels if label.role == "evaluate")
                ),
            },
        )
        self.store.register_snapshot(
            info["id"], campaign_id=self.id, location=info["folder"], manifest=info["manifest"]
        )
        self.store.set_alias("latest", info["id"])
        return str(info["id"])

    # Telling what happens.

    def _end(self, state: str, message: str) -> None:
        self.store.set_campaign_state(self.id, state)
        self.store.log_event(self.id, state, {"message": message})
        self._tell(state, eta_s=None, current=())

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.spec.seed, *key])

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise CampaignStopped

    def _on_progress(self, stage: str) -> OnProgress:
        def tell(done: int, total: int) -> None:
            self._check_stop()
            self._tell(stage, done=done, total=total)

        return tell

    def _show_counts(self, number: int) -> None:
        counts = self.store.assignment_counts(self.id)
        ended = Counter(
            {
                device: sum(n for state, n in states.items() if state in {"done", "failed"})
                for device, states in counts.items()
            }
        )
        self._tell(
            f"measuring, round {number} of {1 + self.spec.rounds.count}",
            done=ended.total(),
            total=sum(self.spec.budget(d) for d in self.spec.devices.keys),
            eta_s=self._pace.eta_s(ended, number),
            current=tuple(f"{w.device}: {t.configuration}" for w, t in self.crew.running()),
        )

    def _tell(self, stage: str | None = None, *, news: str | None = None, **values: Any) -> None:
        lines = self._progress.lines + ((news,) if news else ())
        if stage is not None and stage != self._progress.stage:
            values = {"done": 0, "total": 0, "current": ()} | values
        self._progress = replace(
            self._progress, stage=stage or self._progress.stage, lines=lines, **values
        )
        self._watch(self._progress)
