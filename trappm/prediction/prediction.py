"""The record of a prediction: the figures of a step of a model on a device.

A prediction unpacks as step time, memory, power, in the order of the paper's Figure 8. The heads of
a snapshot predict the first two, and power where a campaign measured it, else the extension
`power_limits` (`answer`). Throughput, what fits, energy and the cost of a training follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from trappm.prediction.cost import Offer, Run
from trappm.prediction.fit import MemoryAnswer, Verdict, room_text
from trappm.profiler.devices.catalogue import CONTEXT_MIB, process_memory_mib
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.host.environment import independent_of_caller
from trappm.profiler.memory.breakdown import MemoryBreakdown, Part, break_down
from trappm.profiler.memory.simulation import LoopPreset, SimulatedMemory, simulate_memory
from trappm.profiler.records import (
    METRICS,
    Execution,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    StepSettings,
    is_cpu_device,
    number_text,
)
from trappm.profiler.traced_step import Trace, TraceSource

if TYPE_CHECKING:
    from trappm.prediction.models import Subject
    from trappm.profiler.memory.simulation import TrainingLoop

UNITS = {**METRICS, "energy_j": "J", "samples_per_s": "1/s", "mfu_percent": "%"}
"""Units of the figures of a step."""
METRIC_NAMES = {
    "step_time_ms": "step time",
    "memory_mib": "memory",
    "power_w": "power",
    "energy_j": "energy",
    "samples_per_s": "throughput",
}
LOADING_REMARK = "without data loading"
"""Remark on the length of a run."""
NEEDS = "it needs "
"""Beginning of the reason for a gap that follows from another gap."""
LONG_MS = 10_000
"""Steps of this length are given in seconds."""

Interval = tuple[float, float, float]
"""Median, low and high."""


@dataclass(frozen=True, kw_only=True)
class BestPowerLimit:
    """Power limit with the least energy per step and at most 5 % more time."""

    power_limit_w: float
    step_time_ms: float
    power_w: float
    energy_j: float
    saved: float
    """Energy saved, as a share of the energy at the factory setting."""


@dataclass(frozen=True, kw_only=True)
class Power:
    """Power of a step that no head predicts."""

    figures: Mapping[str, Interval] = field(default_factory=dict)
    """Median, low and high of power and of what follows from it, by the names of `Prediction`."""
    power_source: str | None = None
    """Labels that it is based on."""
    best_power_limit: BestPowerLimit | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The best label of a step."""

    label_id: int
    label_count: int
    """Number of labels of this step."""
    source: str
    """`measured` or `imported`."""
    architecture: str
    """Name that it was measured under."""
    protocol: str
    step_time_ms: float | None
    memory_mib: float | None
    memory_above_mib: float | None
    """The step ran out of memory, so it needs more than this."""
    power_w: float | None
    compile_s: float | None = None
    """Seconds that compiling took, if it was measured under `torch.compile`."""

    def __str__(self) -> str:
        parts = [
            f"{number_text(value)} {unit}"
            for name, unit in METRICS.items()
            if (value := getattr(self, name)) is not None
        ]
        if self.memory_above_mib is not None:
            parts.append(f"out of memory above {number_text(self.memory_above_mib)} MiB")
        if self.compile_s is not None:
            parts.append(f"compiled in {number_text(self.compile_s)} s")
        others = f" of {self.label_count:,}" if self.label_count > 1 else ""
        origin = f"label {self.label_id}{others}, {self.architecture}"
        return f"{self.source.capitalize()}: {', '.join(parts)} ({origin})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction(MemoryAnswer):
    """Predicted figures of one step; iterating gives step time, memory, power."""

    model: str
    device: str
    """Key of the device."""
    device_name: str
    """Name as people write it, such as `A100 40 GB`."""
    device_is_default: bool = False
    """True if the question named no device."""
    batch_size: int
    input_size: int | None = None
    """Pixels of the images, of named models and of files that are asked at a size."""
    sequence_length: int | None = None
    """Number of tokens, of text models."""
    phase: str
    """`train` or `infer`."""
    precision: str
    memory_format: str
    optimizer: str
    execution: str = Execution.EAGER.value
    """`eager` or `compile`."""
    snapshot: str | None = None
    """Id of the snapshot; None if only the memory is simulated."""
    step_time_ms: float | None = None
    memory_mib: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    samples_per_s: float | None = None
    mfu_percent: float | None = None
    """Model FLOPs utilization of a GPU whose kernels were traced."""
    power_limit_w: float | None = None
    """Power limit of the question; None for the factory setting."""
    card: str | None = None
    """Card behind the device's key, by which it has a price."""
    usd_per_hour: float | None = None
    """Price of the device that the question gave; None for the known prices."""
    power_source: str | None = None
    """Labels that power is based on, if no head of the device predicts it."""
    best_power_limit: BestPowerLimit | None = None
    """Power limit of the least energy, if power and step time are known under any limit."""
    out_of_memory: float | None = None
    """Probability of running out of memory."""
    capacity_mib: float | None = None
    """Memory of the device."""
    largest_batch: int | None = None
    """Largest batch size that fits (`trappm.prediction.fit`); 0 if not even 1 does."""
    mig_profile: str | None = None
    """Smallest MIG profile of an A100 40 GB that holds the upper bound of the memory."""
    run: Run | None = None
    """Cost of a whole training, if the question has its epochs and samples."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Bounds by metric that hold 90 % of new architectures."""
    unfamiliar: tuple[str, ...] = ()
    """Metrics whose head was trained on nothing like this model."""
    beyond_labels: Mapping[str, float] = field(default_factory=dict)
    """Nearest label by metric, for metrics far beyond all labels."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Reason by name, for each of the above that is None."""
    accumulation: int = 1
    """Forward and backward passes per optimizer step; `batch_size` is that of one pass."""
    remarks: tuple[str, ...] = ()
    """Limits of the answer, in sentences."""
    simulated_memory: SimulatedMemory | None = None
    """Memory of the step on CUDA's allocator in MiB, whatever the device, without CUDA's context
    and libraries. Gradients are freed between steps. None if the step cannot be traced."""
    memory_source: TraceSource | None = None
    """Source of the step that is simulated."""
    memory_remark: str | None = None
    """Why no step could be traced, or what the traced step lacks."""
    measured: MeasuredStep | None = None
    """Best label of this step, if labels were asked for and there is one."""
    subject: Subject | None = field(default=None, compare=False)
    """The model, which `memory_breakdown` traces; not part of `to_dict`."""
    loop: TrainingLoop | None = field(default=None, compare=False)
    """Training loop, if it is not the usual one of the optimizer; not part of `to_dict`."""

    def __post_init__(self) -> None:
        """Add the pixels of the subject, which `to_dict` keeps for predictions without one."""
        if self.input_size is None and self.subject is not None:
            object.__setattr__(self, "input_size", self.subject.pixels())

    def __iter__(self) -> Iterator[float | None]:
        return iter((self.step_time_ms, self.memory_mib, self.power_w))

    @cached_property
    @independent_of_caller
    def memory_breakdown(self) -> MemoryBreakdown:
        """Memory at its peak by part, module and tensor; the step is traced for it, in seconds.

        Raises:
            UnsupportedModelError: The step cannot be traced.
        """
        if self.execution == Execution.COMPILE:
            raise UnsupportedModelError("the breakdown is of eager steps; leave compile out")
        if self.subject is None:
            raise UnsupportedModelError(f"the step of {self.model} cannot be traced")
        phase = Phase(self.phase)
        trace = self.subject.trace(self.settings, phase, self.batch_size, with_origins=True)
        return self.break_down(trace)

    @property
    def settings(self) -> StepSettings:
        return StepSettings(
            Precision(self.precision),
            MemoryFormat(self.memory_format),
            Optimizer(self.optimizer),
            Execution(self.execution),
        )

    def break_down(self, trace: Trace) -> MemoryBreakdown:
        """Return the parts of the memory at its peak, from the traced step with origins."""
        allocations, phase = trace.allocations, Phase(self.phase)
        if allocations is None:
            raise UnsupportedModelError(trace.refusal or f"the step of {self.model} is not traced")
        loop = self.loop or LoopPreset.PLAIN.with_optimizer(Optimizer(self.optimizer))
        places = allocations.parameter_places.tolist()
        memory, fixed = simulate_memory(allocations, self.batch_size, loop), {}
        if self.memory_mib is not None and not is_cpu_device(self.device):
            workspace_mib = process_memory_mib(self.device, phase) - CONTEXT_MIB[phase]
            rest_mib = self.memory_mib - memory.reserved_with_workspace_mib
            fixed = {Part.CONTEXT: rest_mib - workspace_mib, Part.WORKSPACES: workspace_mib}
        return break_down(
            allocations,
            trace.origins,
            self.batch_size,
            memory,
            loop.state_bytes(
                allocations.parameter_bytes.tolist(), places, allocations.element_bytes.tolist()
            ),
            fixed_mib=fixed,
            kept_gradients=loop.kept_gradients(places),
        )

    def to_dict(self, *, breakdown_depth: int | None = None) -> dict[str, Any]:
        """Return plain values for JSON.

        Args:
            breakdown_depth: Levels of modules in `memory_breakdown`; None leaves it out.
        """
        values = asdict(replace(self, subject=None, loop=None))
        del values["subject"], values["loop"]
        values = {"sentence": str(self), **values} | {n: getattr(self, n) for n in DERIVED[1:]}
        if breakdown_depth is not None:
            values["memory_breakdown"] = breakdown_dict(self.memory_breakdown, breakdown_depth)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the prediction of `to_dict`, also after JSON.

        Raises:
            KeyError, TypeError, ValueError: The values are not those of a prediction.
        """
        given = {name: value for name, value in values.items() if name not in DERIVED}
        if given["run"]:
            offers = tuple(Offer(**offer) for offer in given["run"]["offers"])
            given["run"] = Run(**given["run"] | {"offers": offers})
        given["simulated_memory"] = given["simulated_memory"] and SimulatedMemory(
            **given["simulated_memory"]
        )
        given["best_power_limit"] = given["best_power_limit"] and BestPowerLimit(
            **given["best_power_limit"]
        )
        given["memory_source"] = given["memory_source"] and TraceSource(given["memory_source"])
        given["intervals"] = {name: tuple(ends) for name, ends in given["intervals"].items()}
        for name in ("unfamiliar", "remarks"):
            given[name] = tuple(given[name])
        return cls(**given)

    @property
    def memory_parts_mib(self) -> dict[str, float]:
        """Parts of a GPU's memory: the simulated step, and the rest of the process.

        Empty if no step could be traced, or the device is no GPU. The last part is the difference
        between prediction and simulation, which is negative if labels show less.
        """
        memory = self.simulated_memory
        if memory is None or self.memory_mib is None or is_cpu_device(self.device):
            return {}
        scratch_mib = max(memory.reserved_with_workspace_mib - memory.reserved_mib, 0.0)
        return {
            "tensors": memory.live_mib,
            "allocator_overhead": memory.reserved_mib - memory.live_mib,
            "convolution_workspace": scratch_mib,
            "context_and_libraries": self.memory_mib - memory.reserved_mib - scratch_mib,
        }

    @property
    def is_memory_simulated(self) -> bool:
        """Return whether the memory is that of the simulated step, without any label's part."""
        memory = self.simulated_memory
        if memory is None or self.memory_mib is None or is_cpu_device(self.device):
            return False
        process_mib = process_memory_mib(self.card or self.device, Phase(self.phase))
        return math.isclose(self.memory_mib, process_mib + memory.reserved_with_workspace_mib)

    @property
    def reserved_mib(self) -> float | None:
        """The result of `torch.cuda.max_memory_reserved()` after the step, by simulation.

        It has the workspaces of cuBLAS, which PyTorch allocates, but not CUDA's context. None if
        no step could be traced, or the device is no GPU.
        """
        memory = self.simulated_memory
        if memory is None or is_cpu_device(self.device):
            return None
        phase = Phase(self.phase)
        workspace_mib = process_memory_mib(self.card or self.device, phase) - CONTEXT_MIB[phase]
        return memory.reserved_with_workspace_mib + workspace_mib

    def figures(self) -> list[tuple[str, float, str, str]]:
        """Return name, value, unit and 90 % interval of each known figure."""
        return [
            (name, value, unit, " to ".join(map(number_text, self.intervals[name])))
            for name, unit in UNITS.items()
            if (value := getattr(self, name)) is not None
        ]

    def gaps(self) -> list[str]:
        """Return one line per reason for missing figures."""
        unknown: dict[str, list[str]] = {}
        for name, words in METRIC_NAMES.items():
            if getattr(self, name) is None:
                unknown.setdefault(self.missing.get(name, "unknown"), []).append(words)
        # A figure that needs a missing one is missing for the same reason.
        roots = [reason for reason in unknown if not reason.startswith(NEEDS)]
        for reason in [r for r in unknown if r.startswith(NEEDS) and roots]:
            unknown[roots[0]] += unknown.pop(reason)
        return [f"No {', '.join(names)}: {reason}." for reason, names in unknown.items()]

    def __repr__(self) -> str:
        return f"<Prediction: {self.model} on {self.device}, batch {self.batch_size:,}: {self}>"

    def __str__(self) -> str:
        """Return the answer in one to three sentences."""
        device = f"{self.device_name} (default)" if self.device_is_default else self.device_name
        settings = self._settings_text()
        memory, verdict, time_ms = self.memory, self.verdict, self.step_time_ms
        sentences = []
        if memory is not None:
            if verdict is None or self.capacity_mib is None:
                room = f"A step needs {memory} on {device}"
            else:
                room = room_text(verdict, device, memory, self.capacity_mib)
            sentences.append(room if time_ms is not None else f"{room}, {settings}")
        if time_ms is not None:
            takes = "would take" if verdict is Verdict.DOES_NOT_FIT else "takes"
            where = "" if sentences else f" on {device}"
            bounds_ms = self.intervals["step_time_ms"]
            unit, scale = ("s", 1000) if bounds_ms[1] >= LONG_MS else ("ms", 1)
            median, low, high = (_number(ms / scale) for ms in (time_ms, *bounds_ms))
            sentences.append(f"A step{where} {takes} {median} {unit} ({low} to {high}) {settings}")
        if self.run is not None:
            sentences.append(_run_text(self.run))
        if self.memory_source is TraceSource.RUN:
            sentences.append("Measured for these inputs; other values may take more")
        if not sentences:
            return f"Nothing is known about this step on {device}, {settings}."
        return " ".join(f"{sentence}." for sentence in sentences)

    def _settings_text(self) -> str:
        """Return what was asked, such as "at 384 px, batch 64, sgd, amp-fp16, eager"."""
        parts = []
        if self.sequence_length is not None:
            parts.append(f"{self.sequence_length:,} tokens")
        elif self.input_size is not None:
            parts.append(f"{self.input_size:,} px")
        is_training = self.phase == Phase.TRAIN
        parts.append(f"batch {self.batch_size:,}")
        if self.accumulation > 1:
            parts.append(f"{self.accumulation} passes")
        parts += [
            self.optimizer if is_training else "inference",
            self.precision,
            "compiled" if self.execution == Execution.COMPILE else "eager",
        ]
        return f"at {', '.join(parts)}"


DERIVED = ("sentence", "fits", "verdict", "memory_parts_mib", "reserved_mib")
"""Values of `to_dict` that follow from the others."""


def _run_text(run: Run) -> str:
    hours = f"{_number(run.hours)} h ({_number(run.low_hours)} to {_number(run.high_hours)})"
    cheapest_of = "from " if len(run.offers) > 1 else ""
    takes, costs = ("takes", "costs") if run.epochs == 1 else ("take", "cost")
    usd = f" and {costs} {cheapest_of}{_number(run.offers[0].usd)} USD" if run.offers else ""
    return f"{run.length} {takes} {hours}{usd}, {LOADING_REMARK}"


def breakdown_dict(breakdown: MemoryBreakdown, depth: int) -> dict[str, Any]:
    """Return a breakdown as plain values for JSON, with modules down to a depth."""
    return {
        "moment": breakdown.moment,
        "parts_mib": {
            part.value.lower().replace(" ", "_"): size_mib
            for part, size_mib in breakdown.parts_mib.items()
        },
        "modules_mib": {m.name: m.size_mib for m in breakdown.modules.walk(depth)},
        "largest": [
            {"size_mib": t.size_mib, "part": t.part, **t.origin._asdict()}
            for t in breakdown.largest
        ],
    }


def quantity(metric: str, value: float) -> str:
    """Return a metric's value with its unit; long step times in seconds."""
    if metric == "step_time_ms" and value >= 1000:
        return f"{_number(value / 1000)} s"
    return f"{_number(value)} {METRICS[metric]}"


def _number(value: float) -> str:
    """Return a number with two or three significant digits."""
    return number_text(value, 3 if value >= 10 else 2)
