"""The learner at work in a thread of its own, beside the measurements that the loop follows."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trappm.cluster.campaign.news import News
from trappm.cluster.campaign.progress import Pace
from trappm.cluster.profiles.step_profiles import StepKey
from trappm.cluster.scheduler.training_report import LeftOut, TrainingReport
from trappm.cluster.workers.interfaces import (
    Choice,
    ChoiceRequest,
    Learner,
    PublishedSnapshot,
    TrainingLabel,
)
from trappm.profiler.devices.catalogue import card_name
from trappm.profiler.host.environment import stack_difference
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.profiler.records import METRICS, Configuration
from trappm.store import Store
from trappm.store.records import Role

OnChosen = Callable[[str, int, Sequence[Choice]], None]
OnLearned = Callable[[TrainingReport, bool], None]


class LearnerThread:
    """Runs the learner's jobs one after another; the loop polls for their results.

    Args:
        on_chosen: called with device, round and what was chosen.
        on_learned: called with the learner's report, and whether the initial draw had ended.
    """

    def __init__(
        self,
        learner: Learner,
        news: News,
        pace: Pace,
        on_chosen: OnChosen,
        on_learned: OnLearned,
    ) -> None:
        self._learner = learner
        self._news = news
        self._pace = pace
        self._on_chosen = on_chosen
        self._on_learned = on_learned
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._pending: tuple[Future[Any], Callable[[Any], None]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._news.stop.set()  # the learner hears of it with its next progress
        self._thread.shutdown()

    @property
    def is_busy(self) -> bool:
        """An answer is still to be handed on."""
        return self._pending is not None

    def prepare(
        self,
        store: Store,
        pool: Sequence[tuple[Configuration, bool]],
        traced: Mapping[StepKey, bytes],
    ) -> None:
        """Gives the learner the pool; waits until its encoder is ready."""
        pairs = {(c.architecture, c.input_size) for c, _ in pool}
        templates = store.workloads.graph_templates(pairs)
        self._news.tell("encoder", total=0)
        self._learner.set_pool(
            [(c, templates[c.architecture, c.input_size]) for c, _ in pool],
            self._news.on_progress("encoder"),
            steps=store.workloads.step_profiles(pairs),
            traced=traced,
        )
        self._news.tell(news=f"encoder: ready, {len(pool)} configurations embedded")

    def choose(self, request: ChoiceRequest, number: int) -> None:
        """Begins to choose a device's part of the round of this number."""
        self._ask(
            lambda: self._learner.choose(request),
            lambda choices: self._on_chosen(request.device, number, choices),
        )

    def learn(self, known: TrainingLabels, initial_ended: bool, is_alone: bool) -> None:
        """Begins to train; its progress is shown if nothing else goes on."""
        if is_alone:
            self._news.tell("learning", total=0)
        begin = time.monotonic()
        on_progress = self._news.on_progress("learning", is_shown=is_alone)

        def learned(report: TrainingReport) -> None:
            self._pace.learned(time.monotonic() - begin)
            self._on_learned(report, initial_ended)

        self._ask(lambda: self._learner.fit(known.labels, on_progress, known.kernels), learned)

    def follow(self, patience_s: float) -> None:
        """Hands on the result of the learner's job, if it ends within so many seconds.

        Raises:
            TrappmError: the learner failed.
        """
        if self._pending is None:
            return
        future, answer = self._pending
        if patience_s:
            wait([future], timeout=patience_s)
        if future.done():
            self._pending = None
            answer(future.result())

    def publish(
        self, registry: Path, campaign_id: str, labels: Sequence[TrainingLabel], errors: Any
    ) -> PublishedSnapshot:
        """Publishes a snapshot with these errors in its manifest."""
        evaluated = Counter(label.device for label in labels if label.role == Role.EVALUATE)
        fields = {
            "campaign": campaign_id,
            "errors": errors,
            "split": "whole architectures held out, uniform draw",
            "evaluation_labels": dict(evaluated),
        }
        return self._learner.publish(registry, fields)

    def promote(self, registry: Path, snapshot_id: str) -> str | None:
        """Makes a snapshot the latest one; None, or why another one stays so."""
        return self._learner.promote(registry, snapshot_id)

    def _ask(self, question: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        self._pending = self._thread.submit(question), answer


@dataclass(frozen=True)
class TrainingLabels:
    """What a campaign's heads learn from and are judged by: one software stack and card a key."""

    labels: Sequence[TrainingLabel]
    left_out: Sequence[LeftOut]
    kernels: Mapping[str, Sequence[KernelMeasurement]]
    """By device: those that were timed under the stack of its labels, if any were."""


def training_labels(store: Store, campaign_id: str) -> TrainingLabels:
    """The labels that a campaign can learn from now, of one software stack for each device key.

    The same key on another software stack, or another card, is another device, whose labels would
    make one head of two things. That of most labels counts, of two alike the one planned first.
    """
    everything = store.labels.of_campaign(campaign_id)
    stacks: dict[str, Counter[str]] = defaultdict(Counter)
    for label in everything:
        stacks[label.device][label.fingerprint] += 1
    most = {device: counts.most_common(1)[0][0] for device, counts in stacks.items()}
    left_out, cards = [], {}
    for device, counts in sorted(stacks.items()):
        known = store.measurements.device_environments(device)
        cards[device] = card_name(device, [known[most[device]]])
        if len(counts) > 1:
            left_out += [
                LeftOut(
                    device,
                    stack,
                    count,
                    stack_difference(known[stack], known[most[device]]) or f"stack {stack}",
                )
                for stack, count in counts.items()
                if stack != most[device]
            ]
    labels = [
        TrainingLabel(
            configuration_id=label.configuration.id,
            device=label.device,
            role=str(label.role),
            values=tuple(getattr(label, metric) for metric in METRICS),
            provenance=label.provenance,
            memory_above_mib=label.memory_above_mib,
            card=cards[label.device],
        )
        for label in everything
        if label.fingerprint == most[label.device]
    ]
    kernels = {device: _kernels(store, device, most[device]) for device in most}
    return TrainingLabels(labels, tuple(left_out), kernels)


def _kernels(store: Store, device: str, stack: str) -> Sequence[KernelMeasurement]:
    """The last good attempts of each kernel of a device under a stack; simulated ones never."""
    environment = store.measurements.device_environments(device)[stack]
    same = [x for x in store.kernels.newest(device) if x.is_of(stack, environment)]
    latest = max(same, key=lambda stack: stack.timed_at, default=None)
    return () if latest is None else store.kernels.latest(device, latest.fingerprint)
