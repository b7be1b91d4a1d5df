"""The record of a prediction: what a step of a model costs on a device, and what follows from that.

A prediction unpacks as step time, memory, power, in the order of the paper's Figure 8. The heads of
a snapshot predict these three (`answering`); throughput, what fits, energy and the cost of a whole
training follow from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Self

from trappm.learner.heads.predictions import StepSettings
from trappm.learner.physics.power.thrift import Thrift
from trappm.prediction.costs import Offer, Run
from trappm.prediction.fitting import MemoryAnswer, Verdict, beside_step_mib, room_text
from trappm.prediction.question import loop_of
from trappm.profiler.devices.catalogue import CONTEXT_MIB
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.records import (
    METRICS,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    is_cpu_device,
)
from trappm.profiler.simulation.memory_breakdown import MemoryBreakdown, Part, break_down
from trappm.profiler.simulation.memory_simulation import SimulatedMemory, simulate_memory
from trappm.profiler.simulation.step_profile import StepSource
from trappm.profiler.text import number_text

if TYPE_CHECKING:
    from trappm.prediction.models.subjects import Subject
    from trappm.prediction.models.tracing import TracedStep
    from trappm.profiler.simulation.training_loop import TrainingLoop

UNITS = {**METRICS, "energy_j": "J", "samples_per_s": "1/s"}
"""Of all figures of a step."""
METRIC_NAMES = {
    "step_time_ms": "step time",
    "memory_mib": "memory",
    "power_w": "power",
    "energy_j": "energy",
    "samples_per_s": "throughput",
}
"""The same in words."""


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

    def __str__(self) -> str:
        parts = [
            f"{number_text(value)} {unit}"
            for name, unit in METRICS.items()
            if (value := getattr(self, name)) is not None
        ]
        if self.memory_above_mib is not None:
            parts.append(f"out of memory above {number_text(self.memory_above_mib)} MiB")
        others = f" of {self.label_count:,}" if self.label_count > 1 else ""
        origin = f"label {self.label_id}{others}, {self.architecture}"
        return f"{self.source.capitalize()}: {', '.join(parts)} ({origin})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction(MemoryAnswer):
    """What one step costs; iterating gives step time, memory, power."""

    model: str
    device: str
    """Key of the device."""
    device_name: str
    """Its name as people write it, such as `A100 40 GB`."""
    device_is_default: bool = False
    """Whether the question named no device."""
    batch_size: int
    sequence_length: int | None = None
    """Number of tokens, of text models."""
    phase: str
    """`train` or `infer`."""
    precision: str
    memory_format: str
    optimizer: str
    snapshot: str | None = None
    """Id of the snapshot that predicts; None if only the memory is simulated."""
    step_time_ms: float | None = None
    memory_mib: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    """Of one step."""
    samples_per_s: float | None = None
    power_limit_w: float | None = None
    """Under which the step runs; None where the question has none: as delivered."""
    power_source: str | None = None
    """What power rests on where no head of the device predicts it: whose labels."""
    thriftiest: Thrift | None = None
    """Where power and step time are known under any limit."""
    out_of_memory: float | None = None
    """The probability that the step does not fit into the device's memory."""
    capacity_mib: float | None = None
    """The device's memory."""
    largest_batch: int | None = None
    """Largest batch size that fits (`trappm.prediction.fitting`); 0 if not even 1 does."""
    mig_profile: str | None = None
    """On an A100 of 40 GB: the smallest part of it that the upper bound of the memory fits into."""
    run: Run | None = None
    """What so many epochs of so many samples cost, where they are given."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """For each metric, the bounds of the interval that 90 % of new architectures lie in."""
    unfamiliar: tuple[str, ...] = ()
    """Metrics whose head has seen nothing like this model: outside of what it knows."""
    beyond_labels: Mapping[str, float] = field(default_factory=dict)
    """For each metric that lies far beyond all labels of it: the nearest of these."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """For each of the above that is None: why."""
    remarks: tuple[str, ...] = ()
    """What else should be known before the answer is relied on."""
    simulated_memory: SimulatedMemory | None = None
    """Of the step in question, with gradients freed between steps, on CUDA's allocator, in MiB,
    whatever the device; without CUDA's context and libraries. None where the step cannot be
    traced."""
    memory_source: StepSource | None = None
    """Whose step the simulated memory rests on."""
    memory_remark: str | None = None
    """Why no step could be traced, or what the traced step lacks."""
    measured: MeasuredStep | None = None
    """Best label of this step, if labels were asked for and there is one."""
    subject: Subject | None = field(default=None, compare=False)
    """The model, which `memory_breakdown` traces; not part of `to_dict`."""
    loop: TrainingLoop | None = field(default=None, compare=False)
    """Training loop, if it is not the usual one of the optimizer; not part of `to_dict`."""

    def __iter__(self) -> Iterator[float | None]:
        return iter((self.step_time_ms, self.memory_mib, self.power_w))

    @cached_property
    def memory_breakdown(self) -> MemoryBreakdown:
        """Memory at its peak by part, module and tensor; the step is traced for it, in seconds.

        Raises:
            UnsupportedModelError: The step cannot be traced.
        """
        if self.subject is None:
            raise UnsupportedModelError(f"the step of {self.model} cannot be traced")
        return self.break_down(
            self.subject.traced_step(self.settings, Phase(self.phase), self.batch_size)
        )

    @property
    def settings(self) -> StepSettings:
        return StepSettings(
            Precision(self.precision), MemoryFormat(self.memory_format), Optimizer(self.optimizer)
        )

    def break_down(self, traced: TracedStep) -> MemoryBreakdown:
        """Return what the memory consists of at its peak, from the traced step."""
        phase = Phase(self.phase)
        loop = self.loop or loop_of(self.optimizer, Precision(self.precision))
        memory, fixed = simulate_memory(traced.trace, self.batch_size, loop), {}
        if self.memory_mib is not None and not is_cpu_device(self.device):
            workspace_mib = beside_step_mib(self.device, phase) - CONTEXT_MIB[phase]
            rest_mib = self.memory_mib - memory.reserved_with_workspace_mib
            fixed = {Part.CONTEXT: rest_mib - workspace_mib, Part.WORKSPACES: workspace_mib}
        return break_down(
            traced.trace,
            traced.origins,
            self.batch_size,
            memory,
            int(traced.trace.parameter_bytes.sum()) * loop.states_per_parameter,
            fixed_mib=fixed,
            keeps_gradients=loop.keeps_gradients,
        )

    def to_dict(self, *, breakdown_depth: int | None = None) -> dict[str, Any]:
        """Return plain values for JSON.

        Args:
            breakdown_depth: Levels of modules in `memory_breakdown`; None leaves it out.
        """
        values = asdict(replace(self, subject=None, loop=None))
        del values["subject"], values["loop"]
        values = {
            "sentence": str(self),
            **values,
            "fits": self.fits,
            "verdict": self.verdict,
            "memory_parts_mib": self.memory_parts_mib,
        }
        if breakdown_depth is not None:
            values["memory_breakdown"] = breakdown_dict(self.memory_breakdown, breakdown_depth)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the prediction of `to_dict`, also after JSON.

        Raises:
            KeyError, TypeError, ValueError: The values are not those of a prediction.
        """
        given = {**values}
        for name in ("sentence", "fits", "verdict", "memory_parts_mib"):  # follow from the others
            del given[name]
        records: dict[str, Any] = {
            "simulated_memory": SimulatedMemory,
            "thriftiest": Thrift,
            "run": Run,
        }
        for name, record in records.items():
            given[name] = given[name] and record(**given[name])
        if given["run"] is not None:
            offers = tuple(Offer(**offer) for offer in given["run"].offers)
            given["run"] = replace(given["run"], offers=offers)
        given["memory_source"] = given["memory_source"] and StepSource(given["memory_source"])
        given["intervals"] = {name: tuple(ends) for name, ends in given["intervals"].items()}
        for name in ("unfamiliar", "remarks"):
            given[name] = tuple(given[name])
        return cls(**given)

    @property
    def memory_parts_mib(self) -> dict[str, float]:
        """What a GPU's memory is made of: the simulated step, and what a process has beside it.

        Empty where no step could be traced, or the device is no GPU. The last part is what labels
        of the device show beside the step, and less than nothing where they show less than it.
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

    def figures(self) -> list[tuple[str, float, str, str]]:
        """Name, value, unit and 90 % spread of each figure that is known."""
        return [
            (name, value, unit, " to ".join(map(number_text, self.intervals[name])))
            for name, unit in UNITS.items()
            if (value := getattr(self, name)) is not None
        ]

    def gaps(self) -> list[str]:
        """A line for each reason why figures are not known."""
        unknown: dict[str, list[str]] = {}
        for name, words in METRIC_NAMES.items():
            if getattr(self, name) is None:
                unknown.setdefault(self.missing.get(name, "unknown"), []).append(words)
        # What needs a figure that is missing is missing for the same reason.
        roots = [reason for reason in unknown if not reason.startswith(NEEDS)]
        for reason in [r for r in unknown if r.startswith(NEEDS) and roots]:
            unknown[roots[0]] += unknown.pop(reason)
        return [f"No {', '.join(names)}: {reason}." for reason, names in unknown.items()]

    def __repr__(self) -> str:
        return f"<Prediction: {self.model} on {self.device}, batch {self.batch_size:,}: {self}>"

    def _repr_html_(self) -> str:
        """Return the answer, a table and remarks, for notebooks."""
        rows = [(name, number_text(v), unit, spread) for name, v, unit, spread in self.figures()]
        cells = "".join(
            f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in row)}</tr>" for row in rows
        )
        settings = f"{self.phase}, {self.precision}, {self.memory_format}, {self.optimizer}"
        small = "".join(
            f"<div><small>{escape(remark)}</small></div>"
            for remark in (settings, *self.gaps(), *self.remarks)
        )
        answer = escape(f"{self.model}, batch {self.batch_size:,}: {self}")
        return f"<div><strong>{answer}</strong><table>{cells}</table>{small}</div>"

    def __str__(self) -> str:
        """The answer in one to three sentences."""
        device = f"{self.device_name} (default)" if self.device_is_default else self.device_name
        tokens = "" if self.sequence_length is None else f" and {self.sequence_length:,} tokens"
        settings = f"in {self.precision} at batch {self.batch_size:,}{tokens}"
        memory, verdict, time = self.memory, self.verdict, self._step_time()
        sentences = []
        if memory is not None:
            if verdict is None or self.capacity_mib is None:
                room = f"A step needs {memory} on {device}"
            else:
                room = room_text(verdict, device, memory, self.capacity_mib)
            sentences.append(room if time is not None else f"{room}, {settings}")
        if time is not None:
            takes = "would take" if verdict is Verdict.DOES_NOT_FIT else "takes"
            where = "" if sentences else f" on {device}"
            sentences.append(f"A step{where} {takes} {time} {settings}")
        if self.run is not None:
            sentences.append(self._whole_run(self.run))
        if not sentences:
            return f"Nothing is known about this step on {device}."
        return " ".join(f"{sentence}." for sentence in sentences)

    def _step_time(self) -> str | None:
        """Such as `99 ms (81 to 209)`; None if it is not predicted."""
        if self.step_time_ms is None:
            return None
        bounds = self.intervals["step_time_ms"]
        unit, scale = ("s", 1000) if bounds[1] >= LONG_MS else ("ms", 1)
        median, low, high = (_number(ms / scale) for ms in (self.step_time_ms, *bounds))
        return f"{median} {unit} ({low} to {high})"

    def _whole_run(self, run: Run) -> str:
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


LOADING_REMARK = "without data loading"
"""What the length of a run leaves out."""


NEEDS = "it needs "
"""How the reason of a gap begins that follows from another."""

LONG_MS = 10_000
"""Steps of so many ms are told in seconds."""


def quantity(metric: str, value: float) -> str:
    """A metric's value with its unit; long step times in seconds."""
    if metric == "step_time_ms" and value >= 1000:
        return f"{_number(value / 1000)} s"
    return f"{_number(value)} {METRICS[metric]}"


def _number(value: float) -> str:
    """With two or three digits that count."""
    return number_text(value, 3 if value >= 10 else 2)
