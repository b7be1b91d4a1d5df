"""From questions to predictions: what the heads say of each, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from trappm.learner.heads.device_heads import Heads
from trappm.learner.heads.predictions import Predictions
from trappm.learner.workload import Workload
from trappm.prediction import costs
from trappm.prediction.device_names import device_title, refuse_precision
from trappm.prediction.fitting import (
    MemoryInterval,
    beside_step_mib,
    largest_batch,
    simulated_interval,
)
from trappm.prediction.models.sizes import size_kind
from trappm.prediction.models.subjects import input_size_of
from trappm.prediction.prediction import (
    METRIC_NAMES,
    MIG_PROFILES,
    NEEDS,
    Figures,
    Fit,
    Prediction,
    mig_profile,
    remarks_on,
)
from trappm.prediction.question import Question
from trappm.prediction.simulated_step import loop_of
from trappm.profiler.devices.capacity import USABLE_SHARE, memory_mib
from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.devices.rank_keys import rank_key
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.models.known_names import is_prefixed
from trappm.profiler.records import METRICS, Optimizer, Phase, is_cpu_device
from trappm.profiler.simulation.step_profile import StepSource

if TYPE_CHECKING:
    from trappm.prediction.models.subjects import Subject
    from trappm.prediction.simulated_step import ModelCall
    from trappm.profiler.simulation.memory_simulation import SimulatedMemory


def answers(asks: Sequence[tuple[Question, Subject, str]]) -> list[Prediction]:
    """What each of these costs; those of the same heads are predicted together, which is quicker.

    Raises:
        SnapshotError: no head for a device and phase.
        InputError: a batch size that a model cannot have.
        TrappmError: no graph can be made of a model.
    """
    inquiries = [_Inquiry(*ask) for ask in asks]
    predictions: dict[_Inquiry, Prediction] = {}
    together: dict[tuple[object, ...], list[_Inquiry]] = {}
    for inquiry in inquiries:
        together.setdefault(inquiry.heads, []).append(inquiry)
    for group in together.values():
        first, workloads = group[0], [inquiry.workload for inquiry in group]
        output = first.predict(workloads)
        capacity = memory_mib(first.card)
        risks = None
        if capacity is not None and "memory_mib" in output.metrics:
            risks = first.out_of_memory(workloads, capacity)
        for row, inquiry in enumerate(group):
            risk = None if risks is None else float(risks[row])
            predictions[inquiry] = inquiry.prediction(output, row, risk, capacity)
    return [predictions[inquiry] for inquiry in inquiries]


def simulated_answer(question: Question, call: ModelCall, device: str, why: str) -> Prediction:
    """Predict the memory alone, by simulation.

    Args:
        question: Settings of the step.
        call: Module, its inputs and its loss.
        device: Key of the device.
        why: Reason why nothing else is predicted.

    Raises:
        UnsupportedModelError: The step cannot be traced.
    """
    from trappm.profiler.models.on_meta import EAGER, eager, is_compiled

    settings = question.given_settings()
    refuse_precision(device, settings.precision)
    step = call.trace(settings, question.batch_size)
    beside_mib = 0.0 if is_cpu_device(device) else beside_step_mib(device, question.phase)

    def memory(batch_size: int) -> MemoryInterval:
        simulated = step.memory(batch_size)
        return simulated_interval(simulated.reserved_with_workspace_mib + beside_mib)

    interval, capacity = memory(step.batch_size), memory_mib(device)
    missing = {name: why for name in (*METRIC_NAMES, "out_of_memory") if name != "memory_mib"}
    largest = None
    if capacity is None:
        missing["largest_batch"] = f"the capacity of {device} is unknown"
    elif step.only_batch is None:
        largest = largest_batch(memory, capacity)
    else:
        missing["largest_batch"] = (
            f"the step is known at batch {step.only_batch} only: {step.only_batch_reason}"
        )
    return Prediction(
        model=type(eager(call.model)).__name__,
        device=device,
        device_name=device_title(device),
        device_is_default=question.device_is_default,
        batch_size=step.batch_size,
        phase=question.phase.value,
        precision=settings.precision.value,
        memory_format=settings.memory_format.value,
        optimizer=settings.optimizer.value,
        snapshot=None,
        step_time_ms=None,
        memory_mib=interval.median_mib,
        power_w=None,
        capacity_mib=capacity,
        largest_batch=largest,
        intervals={"memory_mib": (interval.low_mib, interval.high_mib)},
        missing=missing,
        simulated_memory=step.memory(step.batch_size),
        memory_source=StepSource.TRACED,
        memory_remark=EAGER if is_compiled(call.model) else None,
        remarks=(EAGER,) if is_compiled(call.model) else (),
        call=call,
    )


def memory_of(
    question: Question, subject: Subject, device: str
) -> Callable[[int], MemoryInterval] | None:
    """Return what predicts the memory of a step at a batch size; None if nothing does.

    Raises:
        As `answers`.
    """
    inquiry = _Inquiry(question, subject, device)
    known = "memory_mib" in inquiry.predict([inquiry.workload]).metrics
    return inquiry.memory if known else None


SIMULATED_ERROR = 0.05
"""Deviation of the logarithm: models held out are 0.5 to 6 % off, as
docs/studies/language_models.md tells."""
TRANSFORMERS_REMARK = (
    "No transformer like this one was measured: memory is simulated, and step time is computed "
    "from the kernels."
)
SIMULATED_REMARK = "No transformer like this one was measured: memory is simulated."
_LARGEST: WeakKeyDictionary[Subject, dict[tuple[object, ...], int]] = WeakKeyDictionary()
"""Largest batch sizes by model: each takes a dozen predictions."""


class _Inquiry:
    """A question about one model on one device."""

    def __init__(self, question: Question, subject: Subject, device: str) -> None:
        self.device = device
        self._question = question
        self._subject = subject
        self._snapshot = question.snapshot_for(device)
        self._phase = question.phase
        self._trained, self._basis = question.trained(device, subject.name)
        self._settings = question.settings(self._trained)
        refuse_precision(self.card, self._settings.precision)
        self._profile = subject.profile()
        if self._phase is Phase.TRAIN and self._profile.quantized is not None:
            raise UnsupportedModelError(
                f"{subject.name} is quantised (it has {self._profile.quantized}), and is not "
                "trained; ask about inference: phase infer"
            )
        fixed = self._profile.graph.fixed_batch_size
        self._batch_size = question.batch_size or subject.batch_size or fixed or 1
        self._ranks = rank_key(device).ranks
        self._untraced: str | None = None
        self.workload = self._workload(self._batch_size)

    @property
    def card(self) -> str:
        return self._snapshot.card(self.device)

    @property
    def heads(self) -> tuple[object, ...]:
        """Equal for what the same heads can predict together."""
        traced = self.workload.kernels is not None
        precision = self._settings.precision if self._basis else None
        return self._snapshot.id, self.device, self._phase, traced, self._is_transformer, precision

    @property
    def _is_transformer(self) -> bool:
        return is_prefixed(self._subject.name)

    def predict(self, workloads: Sequence[Workload]) -> Predictions:
        """Return what the heads predict of n workloads.

        The memory of transformers unlike all labels is simulated (docs/transformers.md).
        """
        output = self._of_usual_loop(workloads)
        factors = self._loop_factors(workloads)
        if factors is None or "memory_mib" not in output.metrics:
            return output
        by_metric = np.ones((len(workloads), len(output.metrics)))
        by_metric[:, output.metrics.index("memory_mib")] = factors
        return replace(
            output,
            median=output.median * by_metric,
            low=output.low * by_metric,
            high=output.high * by_metric,
        )

    def _loop_factors(self, workloads: Sequence[Workload]) -> npt.NDArray[np.float64] | None:
        """Return the memory in the question's training loop, relative to the usual loop.

        None if the loop is the usual one of its optimizer, or no step could be traced.
        """
        loop, precision = self._question.loop, self._settings.precision
        if loop is None or self._phase is Phase.INFER:
            return None
        usual = loop_of(loop.optimizer, precision)
        if loop == usual or any(w.step is None for w in workloads):
            return None
        beside_mib = beside_step_mib(self.card, self._phase)
        sizes = [
            [
                beside_mib + w.step.memory_in(one, w.batch_size).reserved_with_workspace_mib
                for one in (loop, usual)
            ]
            for w in workloads
            if w.step is not None
        ]
        return np.array([this / that for this, that in sizes])

    def _of_usual_loop(self, workloads: Sequence[Workload]) -> Predictions:
        heads = self._trained.heads
        output = self._snapshot.predict(workloads, self.device, self._phase, heads)
        steps = [w.step for w in workloads if w.step is not None]
        if not (self._is_transformer and len(steps) == len(workloads) and card_of(self.card)):
            return output
        beside_mib = beside_step_mib(self.card, self._phase)
        memory_mib = [
            beside_mib
            + step.memory(w.batch_size, w.optimizer, phase=w.phase).reserved_with_workspace_mib
            for w, step in zip(workloads, steps, strict=True)
        ]
        return output.where_outside("memory_mib", np.array(memory_mib), SIMULATED_ERROR)

    def out_of_memory(
        self, workloads: Sequence[Workload], capacity_mib: float
    ) -> npt.NDArray[np.float64]:
        """For each of n workloads the probability (n)."""
        heads = self._trained.heads
        is_usual = self._loop_factors(workloads) is None
        if isinstance(heads, Heads) and not self._is_transformer and is_usual:
            return heads.out_of_memory(workloads, capacity_mib)
        output = self.predict(workloads)  # networks, simulations: a normal of the logarithm
        at = output.metrics.index("memory_mib")
        gaps = np.log(output.median[:, at] / (USABLE_SHARE * capacity_mib))
        return np.array([NormalDist().cdf(z) for z in (gaps / output.log_std[:, at]).tolist()])

    def prediction(
        self, output: Predictions, row: int, risk: float | None, capacity: float | None
    ) -> Prediction:
        """The whole answer, from what the heads predicted of it in this row."""
        figures = self._figures(output, row)
        power = self._power(figures)
        figures = figures.with_power(power)
        fit, unfit = self._what_fits(figures.intervals.get("memory_mib"), risk, capacity)
        missing = self._missing(figures) | unfit
        run = self._question.run(self.device, self._batch_size, self._ranks, figures)
        if run is None and self._question.epochs is not None:
            missing["run"] = "it needs the step time"
        return Prediction(
            model=self._subject.name,
            device=self.device,
            device_name=device_title(self.card),
            device_is_default=self._question.device_is_default,
            batch_size=self._batch_size,
            sequence_length=self._sequence_length(),
            phase=self._phase.value,
            precision=self._settings.precision.value,
            memory_format=self._settings.memory_format.value,
            optimizer=self._settings.optimizer.value,
            snapshot=self._snapshot.id,
            run=run,
            missing=missing,
            remarks=tuple(self._remarks(figures)),
            simulated_memory=self._simulated_memory(),
            memory_source=self._profile.step_source,
            memory_remark=self._memory_remark,
            power_limit_w=power.power_limit_w,
            power_source=power.power_source,
            thriftiest=power.thriftiest,
            **vars(figures),
            **vars(fit),
        )

    def _figures(self, output: Predictions, row: int) -> Figures:
        """What the heads predict in this row, and what follows from it."""
        medians = {m: float(output.median[row, at]) for at, m in enumerate(output.metrics)}
        intervals = {
            metric: (float(output.low[row, at]), float(output.high[row, at]))
            for at, metric in enumerate(output.metrics)
        }
        step_time_ms, power_w = medians.get("step_time_ms"), medians.get("power_w")
        energy_j = samples_per_s = None
        if step_time_ms is not None:
            samples_ms = 1000 * self._ranks * self._batch_size
            samples_per_s = samples_ms / step_time_ms
            low, high = intervals["step_time_ms"]
            intervals["samples_per_s"] = (samples_ms / high, samples_ms / low)
            if power_w is not None:
                energy_j = power_w * step_time_ms / 1000
                power = intervals["power_w"]
                intervals["energy_j"] = (power[0] * low / 1000, power[1] * high / 1000)
        return Figures(
            step_time_ms=step_time_ms,
            memory_mib=medians.get("memory_mib"),
            power_w=power_w,
            energy_j=energy_j,
            samples_per_s=samples_per_s,
            intervals=intervals,
            unfamiliar=tuple(m for at, m in enumerate(output.metrics) if output.outside[row, at]),
            beyond_labels=output.beyond_labels(row),
        )

    def _power(self, figures: Figures) -> costs.Power:
        """What no head predicts of it, or what is so under the question's limit."""
        limit_w = self._question.power_limit_w
        if figures.power_w is not None and limit_w is None:
            return costs.Power()
        traced = self._subject.step(self._settings)
        workload = replace(self.workload, kernels=getattr(traced, "kernels", None))
        time_ms = figures.interval("step_time_ms")
        return costs.power_of_step(workload, self._trained.heads, self.card, time_ms, limit_w)

    def _what_fits(
        self, memory: tuple[float, float] | None, risk: float | None, capacity: float | None
    ) -> tuple[Fit, dict[str, str]]:
        """What fits into the device's memory, and why what is None of it is not known.

        `memory` is the interval of the memory at this batch size, where it is known.
        """
        fit = Fit(capacity_mib=capacity, out_of_memory=risk)
        if memory is None or capacity is None:
            unknown = f"the capacity of {self.device} is unknown"
            reason = self._no_head("memory_mib") if memory is None else unknown
            return fit, dict.fromkeys(("out_of_memory", "largest_batch"), reason)
        missing = {}
        fixed = self._profile.graph.fixed_batch_size
        if fixed is None:
            fit = replace(fit, largest_batch=self._largest(capacity))
        else:
            missing["largest_batch"] = f"the file has one batch size only, {fixed}"
        if capacity > MIG_PROFILES[-1][0] * 1024 and self.device.startswith("a100"):
            missing["mig_profile"] = "the rule covers an A100 with 40 GB only"
        elif self.device.startswith("a100"):
            fit = replace(fit, mig_profile=mig_profile(memory[1]))
            if fit.mig_profile is None:
                missing["mig_profile"] = "the upper bound is more than 40 GB"
        return fit, missing

    def _missing(self, figures: Figures) -> dict[str, str]:
        """Why figures are None."""
        reasons = {}
        for metric in METRICS:
            if getattr(figures, metric) is None:
                reasons[metric] = self._no_head(metric)
        if "step_time_ms" in reasons and self._untraced and self._trained.heads.needs_kernels:
            reasons["step_time_ms"] = f"the kernels cannot be traced: {self._untraced}"
        needed = {"energy_j": ("power_w", "step_time_ms"), "samples_per_s": ("step_time_ms",)}
        for name, parts in needed.items():
            lacking = [part for part in parts if getattr(figures, part) is None]
            if lacking:
                named = " and ".join(METRIC_NAMES[part] for part in lacking)
                reasons[name] = f"{NEEDS}{named}"
        return reasons

    def _no_head(self, metric: str) -> str:
        doing = "training" if self._phase is Phase.TRAIN else "inference"
        return (
            f"no model was trained on the {METRIC_NAMES[metric]} of {doing} steps on {self.device}"
        )

    def _remarks(self, figures: Figures) -> list[str]:
        bases = self._snapshot.bases(self.device, self._phase)
        labelled = self._trained.settings if self._trained.heads.label_count else ()
        is_simulated = self._is_transformer and "memory_mib" in figures.unfamiliar
        if self._basis is not None:
            bases.pop("step_time_ms", None)
            labelled = () if is_simulated else labelled
        if is_simulated:
            others = tuple(metric for metric in figures.unfamiliar if metric != "memory_mib")
            figures = replace(figures, unfamiliar=others)
        remarks = remarks_on(figures, device_title(self.card), bases, self._settings, labelled)
        if self._basis is not None:
            remarks.append(f"Step time is based on {self._basis}.")
        if is_simulated:
            remarks.append(SIMULATED_REMARK if self._basis else TRANSFORMERS_REMARK)
        wanted, answered = self._question.optimizer, self._settings.optimizer
        if wanted not in (None, answered):  # Adam and AdamW only
            names = {Optimizer.ADAM: "Adam", Optimizer.ADAMW: "AdamW"}
            remarks.append(
                f"{names[wanted]} is treated as {names[answered]} (same state, same traffic)."
            )
        if self._question.loop is not None and self._question.loop.accumulation_steps > 1:
            remarks.append("Step time is that of a step without gradient accumulation.")
        if self._profile.step is None and self._phase is Phase.TRAIN:
            remarks.append("The training step could not be traced, so memory is a rough estimate.")
        return [*remarks, *filter(None, [self._memory_remark])]

    @property
    def _memory_remark(self) -> str | None:
        return self._profile.step_refusal or self._profile.step_remark or self._untraced

    def _workload(self, batch_size: int) -> Workload:
        traced = self._subject.step(self._settings)
        self._untraced = traced if isinstance(traced, str) else None
        return Workload.of(
            self._profile,
            traced,
            self._settings,
            phase=self._phase,
            batch_size=batch_size,
            with_kernels=self._trained.heads.needs_kernels,
        )

    def _sequence_length(self) -> int | None:
        """Return the number of tokens of a text model; None for other models."""
        if size_kind(self._subject.name) != "tokens":
            return None
        return input_size_of(self._subject.name, self._subject.input_size)

    def _simulated_memory(self) -> SimulatedMemory | None:
        """That of the step in question; None if it cannot be traced."""
        step = self.workload.step
        if step is None or self._untraced is not None:
            return None
        if self._question.loop is not None:
            return step.memory_in(self._question.loop, self._batch_size, self._phase)
        return step.memory(self._batch_size, self._settings.optimizer, phase=self._phase)

    def _largest(self, capacity_mib: float) -> int:
        known = _LARGEST.setdefault(self._subject, {})
        key = (self._snapshot.id, self.device, self._phase, self._settings, self._question.loop)
        if key not in known:
            known[key] = largest_batch(self.memory, capacity_mib)
        return known[key]

    def memory(self, batch_size: int) -> MemoryInterval:
        """Return the predicted memory of the step at a batch size."""
        output = self.predict([self._workload(batch_size)])
        at = output.metrics.index("memory_mib")
        return MemoryInterval(
            *(float(row[0, at]) for row in (output.median, output.low, output.high))
        )
