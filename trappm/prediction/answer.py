"""Answers to questions: predictions of steps by the heads of a snapshot, and their remarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from trappm.learner.heads.physics_heads import Heads, kernel_head
from trappm.learner.interface import Z90, DeviceHeads, Predictions, Workload
from trappm.learner.physics.compiled_step import (
    MEMORY_BELOW_90,
    PARTS,
    RATIO_90,
    has_own_ratio,
    log_ratio,
)
from trappm.learner.physics.prior import UPDATE_SHARE
from trappm.learner.physics.step_time import StepTimePrior
from trappm.prediction import cost
from trappm.prediction.fit import (
    MemoryInterval,
    largest_batch,
    largest_batch_of_many,
    limit_of_step_mib,
    simulated_interval,
    simulated_risk,
)
from trappm.prediction.models import input_size_of, size_kind
from trappm.prediction.prediction import METRIC_NAMES, NEEDS, Interval, Power, Prediction, quantity
from trappm.prediction.question import Question, loop_of
from trappm.prediction.selection import device_title
from trappm.profiler.devices.catalogue import (
    CPU,
    USABLE_SHARE,
    arithmetic_of,
    card_capacity_mib,
    card_of,
    known_spec,
    process_memory_mib,
    rank_key,
)
from trappm.profiler.errors import InputError, TrappmError, UnsupportedModelError
from trappm.profiler.extensions import extension_modules
from trappm.profiler.memory.simulation import LoopPreset, SimulatedMemory, memory_in, reserved_mib
from trappm.profiler.models.families import family_of
from trappm.profiler.records import (
    METRICS,
    Execution,
    Optimizer,
    Phase,
    StepSettings,
    is_cpu_device,
)
from trappm.profiler.traced_step import TraceSource

if TYPE_CHECKING:
    from torch import nn

    from trappm.learner.interface import DeviceHeads
    from trappm.learner.snapshots.manifest import CompiledRatio
    from trappm.prediction.models import Subject
    from trappm.prediction.selection import Selection
    from trappm.profiler.traced_step import Trace

SIMULATED_ERROR = 0.05
"""Deviation of the logarithm of simulated memory on a card with labels of other steps; errors are
0.5 to 6 % (docs/research/memory.md)."""
KERNELS_REMARK = (
    "No model like this one was measured: memory is simulated, and step time is computed from the "
    "kernels."
)
EIGHT_BITS_REMARK = (
    f"No step of {Optimizer.ADAMW_8BIT} was measured: memory has the states of bitsandbytes 0.50, "
    "and step time the bytes that its kernels read and write."
)
EIGHT_BITS_AS_ADAMW_REMARK = (
    f"{Optimizer.ADAMW_8BIT} is treated as {Optimizer.ADAMW} by these heads, so memory is too high."
)
SIMULATED_REMARK = "No model like this one was measured: memory is simulated."
NOT_COMPILED = "it is not predicted for compiled steps"
COMPILED_MEMORY_REMARK = "Memory is that of the eager step; a compiled one takes up to 22 % less."
RATIO_REMARK = "The ratio to the eager step is from pairs of inference steps on an RTX 4090."
OWN_RATIO_REMARK = (
    "The ratio to the eager step is from the fused kernels and this card's eager steps."
)
TRAINING_RATIO_REMARK = (
    "The ratio to the eager step is from the fused kernels; no compiled training step was fitted."
)
VALUES_REMARK = (
    "Measured for these inputs, as the operators depend on values; other values may take more."
)
MIG_PROFILES = ((5.0, "1g.5gb"), (10.0, "2g.10gb"), (20.0, "3g.20gb"), (40.0, "7g.40gb"))
"""Memory in GB below which a step fits a part of an A100 of 40 GB, by DIPPM's rule (Panner Selvam
and Brorsson 2023)."""
COMPILE_MODES = {"triton.cudagraphs": "CUDA graphs", "max_autotune": "autotuned kernels"}
"""Additions of the modes of `torch.compile`, by the key of inductor's configuration."""
_MIB_PER_GB = 1e9 / 2**20
_LARGEST_BATCHES: WeakKeyDictionary[Subject, dict[tuple[object, ...], int]] = WeakKeyDictionary()
"""Largest batch sizes by model: each takes a dozen predictions."""


def answer_questions(questions: Sequence[tuple[Selection, Subject, str]]) -> list[Prediction]:
    """Predict steps; those of the same heads are predicted together, which is faster.

    A device that cannot run the settings gets a prediction without values, and of a module that
    the heads do not cover only the memory is predicted. `missing` has the reasons.

    Args:
        questions: Selection of the question, model and key of the device.

    Raises:
        SnapshotError: There are no heads for a device and phase.
        InputError: A model cannot have the batch size.
        TrappmError: No graph can be made of a model.
    """
    predictions: dict[int, Prediction] = {}
    by_heads: dict[tuple[object, ...], list[tuple[int, _Inquiry]]] = {}
    for place, (selection, subject, device) in enumerate(questions):
        question = selection.question
        if gap := selection.gap(device):
            predictions[place] = _answer_without_values(question, subject, device, gap)
            continue
        inquiry = _Inquiry(selection, subject, device)
        if (why := inquiry.only_memory) is None:
            by_heads.setdefault(inquiry.heads_key, []).append((place, inquiry))
            continue
        answer = answer_by_simulation(question, subject, device, why)
        answer = replace(answer, device_is_default=selection.device_is_default)
        if question.execution is Execution.COMPILE:
            answer = answer_compiled(answer, {}, {**answer.missing, "memory_mib": why})
        predictions[place] = answer
    for group in by_heads.values():
        first, workloads = group[0][1], [inquiry.workload for _, inquiry in group]
        output = first.predict(workloads)
        capacity = card_capacity_mib(first.card)
        risks = None
        if capacity is not None and "memory_mib" in output.metrics:
            risks = first.out_of_memory(workloads, output, capacity)
        for row, (place, inquiry) in enumerate(group):
            risk = None if risks is None else float(risks[row])
            predictions[place] = inquiry.make_prediction(output, row, risk, capacity)
    return [predictions[place] for place in range(len(questions))]


def _answer_without_values(
    question: Question, subject: Subject, device: str, why: str
) -> Prediction:
    return Prediction(
        model=subject.name,
        device=device,
        device_name=device_title(device),
        batch_size=question.batch_size or subject.batch_size or 1,
        accumulation=question.accumulation,
        phase=question.phase.value,
        **_setting_values(question.given_settings()),
        missing=dict.fromkeys(
            (*METRIC_NAMES, "out_of_memory", "largest_batch", *_run_of(question)), why
        ),
    )


def _run_of(question: Question) -> tuple[str, ...]:
    """Return the name of the run in `missing`, if the question has one."""
    return () if question.epochs is None else ("run",)


def _setting_values(settings: StepSettings) -> dict[str, Any]:
    return {name: value.value for name, value in settings._asdict().items()}


def answer_by_simulation(question: Question, subject: Subject, device: str, why: str) -> Prediction:
    """Predict the memory alone, by simulation; `why` is the reason why nothing else is predicted.

    Raises:
        UnsupportedModelError: The step cannot be traced.
    """
    settings, phase = question.given_settings(), question.phase
    batch_size = question.batch_size or subject.batch_size or 1
    trace = subject.trace(settings._replace(execution=Execution.EAGER), phase, batch_size)
    given_loop, loop_remark = question.loop_for(subject, settings)
    loop = given_loop or loop_of(settings.optimizer)
    process_mib = 0.0 if is_cpu_device(device) else process_memory_mib(device, phase)

    limit_mib = limit_of_step_mib(device, phase)

    @cache
    def simulated(size: int) -> SimulatedMemory:
        return memory_in(trace, loop, size, limit_mib)

    def memory(size: int) -> MemoryInterval:
        return simulated_interval(simulated(size).reserved_with_workspace_mib + process_mib)

    interval, capacity = memory(batch_size), card_capacity_mib(device)
    missing = dict.fromkeys((*METRIC_NAMES, "out_of_memory", *_run_of(question)), why)
    del missing["memory_mib"]
    largest = None
    if capacity is None:
        missing["largest_batch"] = f"the capacity of {device} is unknown"
    elif trace.batch_size is None:
        largest = largest_batch(memory, capacity)
    else:
        missing["largest_batch"] = (
            f"the step is known at batch {trace.batch_size} only: {trace.only_because}"
        )
    return Prediction(
        model=subject.name,
        device=device,
        device_name=device_title(device),
        batch_size=batch_size,
        accumulation=question.accumulation,
        phase=phase.value,
        **_setting_values(settings),
        memory_mib=interval.median_mib,
        capacity_mib=capacity,
        largest_batch=largest,
        intervals={"memory_mib": (interval.low_mib, interval.high_mib)},
        missing=missing,
        simulated_memory=simulated(batch_size),
        memory_source=trace.source,
        memory_remark=trace.remark,
        remarks=_remarks_on_simulated(trace, loop_remark),
        subject=subject,
        loop=loop,
    )


def answer_compiled(
    eager: Prediction,
    figures: Mapping[str, Interval],
    without: Mapping[str, str],
    ratio_remark: str = "",
) -> Prediction:
    """Return the answer about the compiled step; the eager figures become one remark.

    Args:
        eager: Answer about the eager step.
        figures: Step time and memory of the compiled step, as far as they are predicted.
        without: Why the others are not, as far as there is a particular reason.
        ratio_remark: Source of the ratio of the step times.
    """
    known = dict(figures)
    if (times := known.get("step_time_ms")) is not None:
        per_ms = 1000 * rank_key(eager.device).ranks * eager.batch_size * eager.accumulation
        known["samples_per_s"] = per_ms / times[0], per_ms / times[2], per_ms / times[1]
    risk = None
    if (memory := known.get("memory_mib")) is not None and eager.capacity_mib is not None:
        deviation = math.log(memory[2] / memory[1]) / (2 * Z90)
        gap = math.log(memory[0] / (USABLE_SHARE * eager.capacity_mib))
        risk = float(_normal_cdf(np.array(gap / deviation)))
    names = (*METRIC_NAMES, "mfu_percent")
    values: dict[str, Any] = {name: known[name][0] if name in known else None for name in names}
    missing = {name: NOT_COMPILED for name in names if name not in known} | dict(without)
    largest = eager.largest_batch if "memory_mib" in known else None
    if largest is None:
        reason = missing.get("memory_mib", NOT_COMPILED)
        missing["largest_batch"] = eager.missing.get("largest_batch", reason)
    if risk is None:
        missing["out_of_memory"] = missing.get("memory_mib", "the device's capacity is unknown")
    return replace(
        eager,
        execution=Execution.COMPILE.value,
        **values,
        out_of_memory=risk,
        largest_batch=largest,
        intervals={name: value[1:] for name, value in known.items()},
        missing=missing,
        unfamiliar=tuple(metric for metric in eager.unfamiliar if metric in known),
        beyond_labels={},
        remarks=_remarks_on_compiled(eager, known, ratio_remark),
        mig_profile=None,
        power_source=None,
        best_power_limit=None,
        run=None,
        simulated_memory=None,
        memory_source=None,
        memory_remark=None,
    )


class _Inquiry:
    """A question about one model on one device."""

    def __init__(self, selection: Selection, subject: Subject, device: str) -> None:
        question = selection.question
        self.device = device
        self._selection = selection
        self._question = question
        self._subject = subject
        self._snapshot = selection.snapshot_for(device)
        self._phase = question.phase
        self._trained, self._basis = selection.trained(device, subject.name)
        self._settings = selection.settings(self._trained)._replace(execution=Execution.EAGER)
        batch_size = question.batch_size or subject.batch_size
        self._trace = subject.trace(self._settings, self._phase, batch_size)
        if self._phase is Phase.TRAIN and self._trace.quantized is not None:
            raise UnsupportedModelError(
                f"{subject.name} is quantized (it has {self._trace.quantized}), so it is not "
                "trained; ask about inference: phase infer"
            )
        if self._trace.allocations is None and not subject.has_one_input:
            raise UnsupportedModelError(self._trace.refusal or "")  # a graph has no loss
        self._batch_size = batch_size or self._trace.batch_size or 1
        self._loop, self._loop_remark = question.loop_for(subject, self._settings)
        self._ranks = rank_key(device).ranks
        self.only_memory = self._trace.refusal if self._trace.graph is None else None
        """Why only the memory is predicted, if that is so."""
        if self.only_memory is None:
            self.workload = self._workload(self._batch_size)
            self._refuse_single_sample()

    def _refuse_single_sample(self) -> None:
        """Raise InputError for a training step of one sample that PyTorch refuses to run."""
        kernels = self.workload.kernels
        if self._phase is Phase.INFER or self._batch_size > 1 or kernels is None:
            return
        if kernels.needs_two_samples:
            raise InputError(
                f"{self._subject.name} cannot be trained at batch size 1: a batch norm would have "
                "one value per channel; give a batch size of 2 or more"
            )

    @property
    def card(self) -> str:
        return self._snapshot.card(self.device)

    @property
    def heads_key(self) -> tuple[object, ...]:
        """Key that is equal for what the same heads can predict together."""
        traced = self.workload.kernels is not None, self._trace.allocations is not None
        settings = self._settings[:2] if self._basis else None
        return self._snapshot.id, self.device, self._phase, traced, self._loop, settings

    @property
    def _shown_settings(self) -> StepSettings:
        """Settings as in the question; the heads may use labels of Adam for AdamW."""
        optimizer = self._question.optimizer or self._settings.optimizer
        execution = self._question.execution
        return self._settings._replace(optimizer=optimizer, execution=execution)

    def predict(
        self, workloads: Sequence[Workload], heads: DeviceHeads | None = None
    ) -> Predictions:
        """Return what the heads predict of n workloads.

        Their memory is simulated where no label is of a step like them.

        Args:
            workloads: Workloads in this question's settings, of any models.
            heads: Some of the heads (default: all).
        """
        heads = heads or self._trained.heads
        output = self._snapshot.predict(workloads, self.device, self._phase, heads)
        if "memory_mib" not in output.metrics:
            return output
        by_metric = np.ones((len(workloads), len(output.metrics)))
        by_metric[:, output.metrics.index("memory_mib")] = self._loop_factors(workloads)
        output = replace(
            output,
            median=output.median * by_metric,
            low=output.low * by_metric,
            high=output.high * by_metric,
        )
        simulated = {
            row: self._simulate_memory(workloads[row].batch_size, workloads[row].trace)
            for row in np.flatnonzero(self._is_simulated(output)).tolist()
        }
        return output.with_intervals("memory_mib", simulated) if simulated else output

    def _is_simulated(self, output: Predictions) -> npt.NDArray[np.bool_]:
        """Return for which of n workloads the memory comes from the simulation, shape (n,).

        It does where no label is of a step like this one, or nearly as large or small, on a GPU
        with a known context.
        """
        at = output.metrics.index("memory_mib")
        unlike = output.outside[:, at] | ~np.isnan(output.extrapolated_from[:, at])
        if not self._can_be_simulated:
            return np.zeros_like(unlike)
        return np.ones_like(unlike) if self._log_error is None else unlike

    @property
    def _can_be_simulated(self) -> bool:
        return self._trace.allocations is not None and card_of(self.card) is not None

    @property
    def _log_error(self) -> float | None:
        """Bound of the error of simulated memory; None without labels of the card's memory."""
        heads = self._trained.heads
        is_labelled = not isinstance(heads, Heads) or heads.has_labels_of("memory_mib")
        return Z90 * SIMULATED_ERROR if is_labelled else None

    def _simulate_step(
        self, batch_size: int, trace: Trace | None = None, *, is_answer: bool
    ) -> SimulatedMemory:
        """Return the simulated step; the device may be full if its memory is the answer.

        Args:
            batch_size: Samples per step.
            trace: Step of another model (default: of this question's).
            is_answer: True if its memory is the answer.
        """
        loop = self._loop or loop_of(self._settings.optimizer)
        limit_mib = None
        if is_answer:
            limit_mib = limit_of_step_mib(self.card, self._phase, self._log_error)
        return memory_in(trace or self._trace, loop, batch_size, limit_mib)

    def _simulate_memory(self, batch_size: int, trace: Trace | None = None) -> MemoryInterval:
        """Return the memory of a process with the simulated step, of another model if `trace`."""
        process_mib = process_memory_mib(self.card, self._phase)
        step = self._simulate_step(batch_size, trace, is_answer=True)
        return simulated_interval(process_mib + step.reserved_with_workspace_mib, self._log_error)

    def _loop_factors(self, workloads: Sequence[Workload]) -> npt.NDArray[np.float64]:
        """Return the memory in the question's loop, relative to that of the labels, shape (n,).

        Labels are of the usual loop of their optimizer, unless others published them. The factor is
        1 for a step that could not be traced.
        """
        loop, heads = self._loop or loop_of(self._settings.optimizer), self._trained.heads
        if is_cpu_device(self.device):  # the allocator is that of CUDA
            loop = replace(loop, expandable_segments=False)
        labelled = heads.memory_loop if isinstance(heads, Heads) else LoopPreset.PLAIN
        of_labels = labelled.with_optimizer(loop.optimizer)
        steps = [(w.trace, w.batch_size) for w in workloads if w.trace is not None]
        is_same = loop == of_labels or (self._phase is Phase.INFER and not loop.expandable_segments)
        if is_same or len(steps) < len(workloads):
            return np.ones(len(workloads))
        process_mib = process_memory_mib(self.card, self._phase)
        asked, known = (
            process_mib + np.array([reserved_mib(step, each, size) for step, size in steps])
            for each in (loop, of_labels)
        )
        return np.asarray(asked / known)

    def out_of_memory(
        self, workloads: Sequence[Workload], output: Predictions, capacity_mib: float
    ) -> npt.NDArray[np.float64]:
        """Return the probability of running out of memory for each of n workloads, shape (n,).

        Args:
            workloads: Workloads in this question's settings, of any models.
            output: What `predict` returned for them.
            capacity_mib: Memory of the device.
        """
        at = output.metrics.index("memory_mib")
        medians_mib, heads = output.median[:, at], self._trained.heads
        is_simulated = self._is_simulated(output)
        if is_simulated.all() and self._log_error is None:
            return simulated_risk(medians_mib, capacity_mib)
        gaps = np.log(medians_mib / (USABLE_SHARE * capacity_mib))
        normal = _normal_cdf(gaps / output.log_std[:, at])  # of the logarithm
        if not isinstance(heads, Heads):
            return normal
        factors = self._loop_factors(workloads)
        return np.where(
            is_simulated, normal, heads.out_of_memory(workloads, capacity_mib / factors)
        )

    def make_prediction(
        self, output: Predictions, row: int, risk: float | None, capacity: float | None
    ) -> Prediction:
        """Return the whole answer, from what the heads predicted in this row."""
        outside = [m for at, m in enumerate(output.metrics) if output.outside[row, at]]
        is_simulated = "memory_mib" in output.metrics and bool(self._is_simulated(output)[row])
        beyond = output.beyond_labels(row)
        figures = self._figures(output, row)
        power = self._find_power(figures)
        figures |= power.figures
        is_unlike = is_simulated and ("memory_mib" in outside or "memory_mib" in beyond)
        if is_simulated:
            beyond.pop("memory_mib", None)
        remarks = self._remarks(figures, outside, beyond, is_simulated=is_unlike)
        time_factor = self._time_factor(figures)
        figures = self._scale_to_all_passes(figures, time_factor)
        best_limit = power.best_power_limit
        if best_limit is not None:
            best_limit = replace(
                best_limit,
                step_time_ms=time_factor * best_limit.step_time_ms,
                energy_j=time_factor * best_limit.energy_j,
            )
        fit, missing = self._find_fit(figures.get("memory_mib"), risk, capacity)
        missing |= self._missing_reasons(figures)
        question = self._question
        if question.epochs is not None and "step_time_ms" not in figures:
            missing["run"] = f"{NEEDS}the step time"
        medians: dict[str, Any] = {name: value[0] for name, value in figures.items()}
        answer = Prediction(
            model=self._subject.name,
            device=self.device,
            device_name=device_title(self.card),
            device_is_default=self._selection.device_is_default,
            batch_size=self._batch_size,
            accumulation=question.accumulation,
            sequence_length=self._sequence_length(),
            phase=self._phase.value,
            **_setting_values(self._shown_settings),
            snapshot=self._snapshot.id,
            **medians,
            intervals={name: value[1:] for name, value in figures.items()},
            **fit,
            power_limit_w=question.power_limit_w,
            usd_per_hour=question.usd_per_hour,
            card=self.card,
            power_source=power.power_source,
            best_power_limit=best_limit,
            run=self._run_cost(figures),
            unfamiliar=tuple(outside),
            beyond_labels=beyond,
            missing=missing,
            remarks=tuple(remarks),
            simulated_memory=None
            if self._trace.allocations is None
            else self._simulate_step(self._batch_size, is_answer=is_simulated),
            memory_source=None if self._trace.allocations is None else self._trace.source,
            memory_remark=self._memory_remark,
            subject=self._subject,
            loop=self._loop,
        )
        return (
            answer
            if question.execution is Execution.EAGER
            else self._answer_compiled(answer, figures)
        )

    def _answer_compiled(self, eager: Prediction, figures: Mapping[str, Interval]) -> Prediction:
        """Return the answer about the compiled step from the one about the eager step."""
        known: dict[str, Interval] = {}
        times = self._compiled_step_time(figures)
        if not isinstance(times, str):
            known["step_time_ms"] = times
        without = {"step_time_ms": times} if isinstance(times, str) else {}
        if is_cpu_device(self.device):
            without["memory_mib"] = "inductor's copies on a CPU are not simulated"
        elif "memory_mib" in figures:
            median, low, high = figures["memory_mib"]
            below = math.hypot(math.log(median / low), MEMORY_BELOW_90)
            known["memory_mib"] = median, median / math.exp(below), high
        if self._question.epochs is not None and "step_time_ms" in without:
            without["run"] = f"{NEEDS}the step time"
        answer = answer_compiled(eager, known, without, self._ratio_remark)
        return replace(answer, run=self._run_cost(known))

    def _eager_and_compiled(self) -> tuple[Workload, Workload] | str:
        """Return the eager and the compiled step of one rank, or why they cannot be compared."""
        if self._ranks > 1:
            return f"no compiled step was measured on anything like {self.device}"
        workloads = []
        for how in Execution:
            settings = self._settings._replace(execution=how)
            try:
                trace = self._subject.trace(settings, self._phase, self._batch_size)
            except TrappmError as error:
                return f"the kernels cannot be traced: {error}"
            if trace.kernels is None:
                return f"the kernels cannot be traced: {trace.refusal}"
            workload = self._workload(self._batch_size)
            workloads.append(replace(workload, trace=trace, kernels=trace.kernels))
        return workloads[0], workloads[1]

    @property
    def _measured_ratio(self) -> CompiledRatio | None:
        """The ratio of compiled steps from pairs of the device.

        A median is no match for the reference's kernels in inference on a GPU.
        """
        ratio = self._snapshot.manifest.compiled.get(self.device, {}).get(self._phase)
        of_kernels = ratio is not None and len(ratio.constants) == len(PARTS)
        if self._phase is Phase.TRAIN or is_cpu_device(self.device) or of_kernels:
            return ratio
        return None

    def _compiled_step_time(self, figures: Mapping[str, Interval]) -> Interval | str:
        """Return the step time under `torch.compile`, or why it is not predicted.

        It is the eager one times the ratio by the fused kernels, or the median of measured pairs.
        """
        ratio = self._measured_ratio
        unknown = f"no compiled step was measured on anything like {self.device}"
        if "step_time_ms" not in figures or (ratio is None and is_cpu_device(self.device)):
            return unknown
        family = family_of(self._subject.name) if self._subject.is_named else None
        log_error = RATIO_90[self._phase] if ratio is None else ratio.log_error
        if ratio is not None and len(ratio.constants) != len(PARTS):
            log = ratio.log_ratio + ratio.families.get(family or "", 0.0)
            return _scale_interval(figures["step_time_ms"], log, log_error)
        steps = self._eager_and_compiled()
        if isinstance(steps, str):
            return steps
        eager, compiled = steps
        if ratio is None:
            log = log_ratio(eager, compiled, family, prior=self._kernel_prior)
        else:
            log = log_ratio(eager, compiled, family, ratio.constants, ratio.families)
        return _scale_interval(figures["step_time_ms"], log, log_error)

    @property
    def _ratio_remark(self) -> str:
        """The source of the ratio of a compiled step's time to the eager one's."""
        if (ratio := self._measured_ratio) is not None:
            return f"The ratio to the eager step is from {ratio.pairs} pairs on {self.device}."
        if self._kernel_prior is not None:
            return OWN_RATIO_REMARK
        return RATIO_REMARK if self._phase is Phase.INFER else TRAINING_RATIO_REMARK

    @property
    def _kernel_prior(self) -> StepTimePrior | None:
        """The prior of the device's eager steps by kernels, if its compiled steps follow it."""
        if not has_own_ratio(self.card, self._settings.precision, self._phase):
            return None
        head = kernel_head(self._trained.heads)
        return None if head is None else head.prior

    def _figures(self, output: Predictions, row: int) -> dict[str, Interval]:
        """Return median, low and high of what the heads predict in this row, and what follows."""
        figures: dict[str, Interval] = {
            metric: _interval(output, row, metric) for metric in output.metrics
        }
        if times := figures.get("step_time_ms"):
            if powers := figures.get("power_w"):
                median, low, high = (w * ms / 1000 for w, ms in zip(powers, times, strict=True))
                figures["energy_j"] = median, low, high
            median, low, high = (1000 * self._ranks * self._batch_size / ms for ms in times)
            figures["samples_per_s"] = median, high, low
            spec = known_spec(self.card)
            kernels = self.workload.kernels
            if spec is not None and spec is not CPU and kernels is not None:
                precision = self.workload.precision
                ideal_ms = spec.products_at_peak_ms(kernels.at(self._batch_size), precision)
                median, low, high = (100 * ideal_ms / ms for ms in times)
                figures["mfu_percent"] = median, high, low
        return figures

    def _time_factor(self, figures: Mapping[str, Interval]) -> float:
        """Return the time of a step of all passes relative to that of a step of one pass.

        Forward and backward pass are repeated, the optimizer's step is not.
        """
        passes = self._question.accumulation
        if passes == 1 or "step_time_ms" not in figures:
            return 1.0
        heads = self._trained.heads
        head = heads.heads.get("step_time_ms") if isinstance(heads, Heads) else None
        share = 1 - UPDATE_SHARE
        if head is not None:
            share = float(head.prior.pass_share([self.workload])[0])
        return 1 + (passes - 1) * share

    def _scale_to_all_passes(
        self, figures: dict[str, Interval], time_factor: float
    ) -> dict[str, Interval]:
        """Return the figures of a step of all passes from those of a step of one pass.

        Args:
            figures: Median, low and high by name.
            time_factor: Time of the step of all passes relative to that of one pass.
        """
        passes = self._question.accumulation
        if passes == 1:
            return figures
        factors = {"step_time_ms": time_factor, "energy_j": time_factor}
        factors |= dict.fromkeys(("samples_per_s", "mfu_percent"), passes / time_factor)
        return figures | {
            name: (median * factor, low * factor, high * factor)
            for name, factor in factors.items()
            if name in figures
            for median, low, high in [figures[name]]
        }

    def _run_cost(self, figures: Mapping[str, Interval]) -> cost.Run | None:
        """Return the cost of the whole run, if there is one and a step time is predicted."""
        question = self._question
        if question.epochs is None or question.samples is None or "step_time_ms" not in figures:
            return None
        energy_j = figures["energy_j"][0] if "energy_j" in figures else None
        return cost.run_of(
            epochs=question.epochs,
            samples=question.samples,
            batch_size=self._ranks * self._batch_size * question.accumulation,
            step_time_ms=figures["step_time_ms"],
            energy_j=None if energy_j is None else self._ranks * energy_j,
            carbon_g_per_kwh=question.carbon_g_per_kwh,
            prices=cost.prices_of(self.device, question.usd_per_hour, self.card),
        )

    def _find_power(self, figures: Mapping[str, Interval]) -> Power:
        """Return the power that no head predicts, or that is so under the question's limit."""
        limit_w = self._question.power_limit_w
        if "power_w" in figures and limit_w is None:
            return Power()
        workload = replace(self.workload, kernels=self._trace.kernels)
        time_ms = figures.get("step_time_ms")
        return power_of_step(workload, self._trained.heads, self.card, time_ms, limit_w)

    def _find_fit(
        self, memory: Interval | None, risk: float | None, capacity: float | None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what fits the device by the names of `Prediction`, and the reasons of gaps."""
        fit: dict[str, Any] = {"capacity_mib": capacity, "out_of_memory": risk}
        if memory is None or capacity is None:
            unknown = f"the capacity of {self.device} is unknown"
            reason = self._no_head_reason("memory_mib") if memory is None else unknown
            return fit, dict.fromkeys(("out_of_memory", "largest_batch"), reason)
        missing = {}
        only = self._trace.batch_size
        if only is None:
            fit["largest_batch"] = self._find_largest_batch(capacity)
        else:
            why = self._trace.only_because
            missing["largest_batch"] = f"the step is known at batch {only} only: {why}"
        if self.device.startswith("a100"):
            parts = (name for gb, name in MIG_PROFILES if memory[2] < gb * _MIB_PER_GB)
            if capacity > MIG_PROFILES[-1][0] * 1024:
                missing["mig_profile"] = "the rule covers an A100 with 40 GB only"
            elif (part := next(parts, None)) is not None:
                fit["mig_profile"] = part
            else:
                missing["mig_profile"] = "the upper bound is more than 40 GB"
        return fit, missing

    def _missing_reasons(self, figures: Mapping[str, Interval]) -> dict[str, str]:
        """Return the reason for each figure that is missing."""
        reasons = {
            metric: self._no_head_reason(metric) for metric in METRICS if metric not in figures
        }
        untraced = self._trace.refusal
        if "step_time_ms" in reasons and untraced and self._trained.heads.needs_kernels:
            reasons["step_time_ms"] = f"the kernels cannot be traced: {untraced}"
        needed = {"energy_j": ("power_w", "step_time_ms"), "samples_per_s": ("step_time_ms",)}
        for name, parts in needed.items():
            lacking = [METRIC_NAMES[part] for part in parts if part not in figures]
            if lacking:
                reasons[name] = f"{NEEDS}{' and '.join(lacking)}"
        return reasons

    def _no_head_reason(self, metric: str) -> str:
        doing = "training" if self._phase is Phase.TRAIN else "inference"
        return (
            f"no model was trained on the {METRIC_NAMES[metric]} of {doing} steps on {self.device}"
        )

    def _remarks(
        self,
        figures: Mapping[str, Interval],
        outside: Sequence[str],
        beyond: Mapping[str, float],
        *,
        is_simulated: bool,
    ) -> list[str]:
        """Return what limits the figures: distance from labels, their source, settings."""
        remarks = []
        unfamiliar = [m for m in outside if not (is_simulated and m == "memory_mib")]
        if unfamiliar:
            names = " and ".join(METRIC_NAMES[metric] for metric in unfamiliar)
            remarks.append(
                f"No measured model resembles this one, so {names} may be less reliable."
            )
        for metric, end in beyond.items():
            value = figures[metric][0]
            most = "largest" if value > end else "smallest"
            remarks.append(
                f"Extrapolation: the {most} measured {METRIC_NAMES[metric]} was "
                f"{quantity(metric, end)}, this prediction is {quantity(metric, value)}."
            )
        bases = self._snapshot.bases(self.device, self._phase)
        if self._basis is not None:
            bases.pop("step_time_ms", None)
        by_basis: dict[str, list[str]] = {}
        for metric, basis in bases.items():
            by_basis.setdefault(basis, []).append(METRIC_NAMES[metric])
        remarks += [
            f"No model was trained on the {' and '.join(names)} of {device_title(self.card)}; "
            f"{'it comes' if len(names) == 1 else 'they come'} from {basis}."
            for basis, names in by_basis.items()
        ]
        labelled = self._trained.settings if self._trained.heads.label_count else ()
        precision = arithmetic_of(self.card, self._settings.precision)
        is_labelled = self._settings._replace(precision=precision) in labelled
        if labelled and not is_labelled and not (self._basis and is_simulated):
            given, usual = (", ".join(row[:3]) for row in (self._shown_settings, labelled[0]))
            remarks.append(
                f"No label of this device has these settings ({given}); most have: {usual}."
            )
        if self._basis is not None:
            remarks.append(f"Step time is based on {self._basis}.")
        if is_simulated:
            remarks.append(SIMULATED_REMARK if self._basis else KERNELS_REMARK)
        wanted, answered = self._question.optimizer, self._settings.optimizer
        if wanted is not None and wanted is not answered:  # Adam and AdamW only
            words = {Optimizer.ADAM: "Adam", Optimizer.ADAMW: "AdamW"}
            remarks.append(
                f"{words[wanted]} is treated as {words[answered]} (same state, same traffic)."
            )
        unmeasured = wanted not in {row.optimizer for row in labelled}
        if wanted is Optimizer.ADAMW_8BIT and unmeasured and self._phase is Phase.TRAIN:
            has_kernels = isinstance(self._trained.heads, Heads)
            remarks.append(EIGHT_BITS_REMARK if has_kernels else EIGHT_BITS_AS_ADAMW_REMARK)
        if self._trace.source is TraceSource.RUN:
            remarks.append(VALUES_REMARK)
        if self._trace.allocations is None and self._phase is Phase.TRAIN:
            remarks.append("The training step could not be traced, so memory is a rough estimate.")
        return [*remarks, *filter(None, [self._loop_remark, self._memory_remark])]

    @property
    def _memory_remark(self) -> str | None:
        return self._trace.refusal or self._trace.remark

    def _workload(self, batch_size: int) -> Workload:
        workload = Workload.of(
            self._trace,
            self._settings,
            batch_size=batch_size,
            with_kernels=self._trained.heads.needs_kernels,
        )
        allocations, kernels = self._trace.allocations, workload.kernels
        if self._loop is None or allocations is None or kernels is None:
            return workload
        sizes = allocations.parameter_bytes
        held = self._loop.held(allocations.parameter_places.tolist())
        share = float(sizes[held].sum()) / max(int(sizes.sum()), 1)
        updated = round(kernels.parameters * share)
        return replace(
            workload, kernels=replace(kernels, parameter_tensors=len(held), parameters=updated)
        )

    def _sequence_length(self) -> int | None:
        """Return the number of tokens of a text model; None for other models."""
        if size_kind(self._subject.name) != "tokens":
            return self._subject.sequence_length
        return input_size_of(self._subject.name, self._subject.input_size)

    def _find_largest_batch(self, capacity_mib: float) -> int:
        known = _LARGEST_BATCHES.setdefault(self._subject, {})
        key = (self._snapshot.id, self.device, self._phase, self._settings, self._loop)
        if key not in known:
            if self._can_be_simulated and self._log_error is None:
                known[key] = largest_batch(self._simulate_memory, capacity_mib)
            else:
                known[key] = largest_batch_of_many(self._predict_memories, capacity_mib)
        return known[key]

    def _predict_memories(self, batch_sizes: Sequence[int]) -> list[MemoryInterval]:
        """Return the predicted memory of the step at each batch size."""
        heads = self._trained.heads
        if isinstance(heads, Heads):
            heads = heads.only("memory_mib")
        output = self.predict([self._workload(size) for size in batch_sizes], heads)
        rows = range(len(batch_sizes))
        return [MemoryInterval(*_interval(output, row, "memory_mib")) for row in rows]


def power_of_step(
    workload: Workload,
    heads: DeviceHeads,
    card: str,
    step_time_ms: Interval | None,
    limit_w: float | None,
) -> Power:
    """Return power and energy of a step on a card, by its kernels; an extension computes them.

    Args:
        workload: Step, with its kernels if they could be traced.
        heads: Heads of the device.
        card: The card by any of its names.
        step_time_ms: Step time at the factory setting; None if no head predicts it.
        limit_w: Power limit (default: factory setting).

    Raises:
        InputError: The card has no such limit, its power is unknown, or no installed extension
            knows limits.
    """
    extension = next(iter(extension_modules("step_power")), None)
    if extension is not None:
        power: Power = extension.power_of_step(workload, heads, card, step_time_ms, limit_w)
        return power
    if limit_w is not None:
        raise InputError(
            f"a power limit of {limit_w:g} W needs the extension trappm.extensions.power_limits, "
            "which is not installed; install TraPPM again, or leave the limit out"
        )
    return Power()


def _remarks_on_simulated(trace: Trace, loop_remark: str | None) -> tuple[str, ...]:
    """Return the remarks on memory that is simulated alone."""
    of_values = VALUES_REMARK if trace.source is TraceSource.RUN else None
    return tuple(filter(None, (trace.remark, loop_remark, of_values)))


def _remarks_on_compiled(
    eager: Prediction, figures: Mapping[str, Interval], ratio_remark: str
) -> tuple[str, ...]:
    """Return the remarks on a compiled step: its eager figures and remarks, and its sources."""
    remarks = [remark for remark in eager.remarks if remark != eager.memory_remark]
    in_eager = [quantity(name, value) for name in METRICS if (value := getattr(eager, name))]
    if in_eager:
        remarks.insert(0, f"In eager mode this step takes {', '.join(in_eager)}.")
    if "step_time_ms" in figures:
        remarks.append(ratio_remark)
    if "memory_mib" in figures:
        remarks.append(COMPILED_MEMORY_REMARK)
    return tuple(remarks)


def remarks_on_module(module: nn.Module, execution: Execution) -> list[str]:
    """Return a remark on each setting of a module and its process that no answer covers."""
    import torch

    remarks = []
    how = getattr(module, "dynamo_ctx", None)  # of torch.compile
    if how is not None and execution is Execution.COMPILE:
        config = getattr(how, "compiler_config", None)  # None for other backends than inductor
        names = [name for key, name in COMPILE_MODES.items() if config and config.get(key)]
        if config is None or names:
            what = " and ".join(names) if config else "the module's own backend of torch.compile"
            remarks.append(f"Not covered: {what}; this is inductor's default mode.")
    if torch.backends.cudnn.benchmark:
        remarks.append("Not covered: cudnn.benchmark, which is on here; it was off for labels.")
    return remarks


def _normal_cdf(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the standard normal distribution function (n), accurate in its tails, too."""
    erfc = np.vectorize(math.erfc, otypes=[np.float64])
    return np.asarray(0.5 * erfc(-values / math.sqrt(2)))


def _scale_interval(eager: Interval, log_ratio: float, log_error: float) -> Interval:
    """Return a figure times a ratio with an error of its own, the bound of 90 % (logarithms)."""
    median, low, high = (math.log(value) for value in eager)
    low = log_ratio + median - math.hypot(median - low, log_error)
    high = log_ratio + median + math.hypot(high - median, log_error)
    return math.exp(log_ratio + median), math.exp(low), math.exp(high)


def _interval(output: Predictions, row: int, metric: str) -> Interval:
    """Return median, low and high of a metric in a row."""
    at = output.metrics.index(metric)
    return float(output.median[row, at]), float(output.low[row, at]), float(output.high[row, at])
