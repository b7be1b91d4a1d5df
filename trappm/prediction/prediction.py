"""The record of a prediction: what a step of a model costs on a device, and what follows from that.

A prediction unpacks as step time, memory, power, in the order of the paper's Figure 8. The heads of
a snapshot predict these three (`answering`); throughput, what fits, energy and the cost of a whole
training follow from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from trappm.learner.heads.predictions import StepSettings
from trappm.learner.physics.power.thrift import Thrift
from trappm.notebook_cards import card
from trappm.prediction.costs import Offer, Power, Run
from trappm.prediction.fitting import MemoryAnswer, Verdict, room_text
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.number_text import number_text
from trappm.profiler.records import METRICS, MemoryFormat, Optimizer, Precision, is_cpu_device
from trappm.profiler.simulation.memory_simulation import SimulatedMemory
from trappm.profiler.simulation.step_profile import StepSource

if TYPE_CHECKING:
    from trappm.learner.physics.power.step_power import Interval
    from trappm.prediction.measured import MeasuredStep
    from trappm.prediction.simulated_step import ModelCall
    from trappm.profiler.simulation.memory_breakdown import MemoryBreakdown


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one step costs, by the names of `Prediction`; None where it is not known."""

    step_time_ms: float | None
    memory_mib: float | None
    power_w: float | None
    energy_j: float | None
    samples_per_s: float | None
    intervals: Mapping[str, tuple[float, float]]
    unfamiliar: tuple[str, ...]
    beyond_labels: Mapping[str, float]

    def interval(self, name: str) -> Interval | None:
        """Median, low and high; None where it is not known."""
        median = getattr(self, name)
        return None if median is None else (median, *self.intervals[name])

    def with_power(self, power: Power) -> Figures:
        """With what is known of the step's power, and of its time under a limit."""
        medians: dict[str, Any] = {name: value[0] for name, value in power.figures.items()}
        bounds = {name: value[1:] for name, value in power.figures.items()}
        return replace(self, **medians, intervals={**self.intervals, **bounds})


MIG_PROFILES = ((5.0, "1g.5gb"), (10.0, "2g.10gb"), (20.0, "3g.20gb"), (40.0, "7g.40gb"))
"""DIPPM's rule (Panner Selvam and Brorsson 2023): memory below so many GB fits this part of one."""
MIB_PER_GB = 1e9 / 2**20


def mig_profile(upper_mib: float) -> str | None:
    """The smallest part of an A100 of 40 GB that so much memory fits into; None if none does."""
    return next((name for gb, name in MIG_PROFILES if upper_mib < gb * MIB_PER_GB), None)


@dataclass(frozen=True)
class Fit:
    """What the device's memory holds, by the names of `Prediction`; None where it is not known."""

    capacity_mib: float | None
    out_of_memory: float | None
    largest_batch: int | None = None
    mig_profile: str | None = None


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
    snapshot: str | None
    """Id of the snapshot that predicts; None if only the memory is simulated."""
    step_time_ms: float | None
    memory_mib: float | None
    power_w: float | None
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
    simulated_memory: SimulatedMemory | None
    """Of the step in question, with gradients freed between steps, on CUDA's allocator, in MiB,
    whatever the device; without CUDA's context and libraries. None where the step cannot be
    traced."""
    memory_source: StepSource | None
    """Whose step the simulated memory rests on."""
    memory_remark: str | None
    """Why no step could be traced, or what the traced step lacks."""
    measured: MeasuredStep | None = None
    """Best label of this step, if labels were asked for and there is one."""
    call: ModelCall | None = field(default=None, compare=False)
    """Model and inputs, which `memory_breakdown` traces; not part of `to_dict`."""

    def __iter__(self) -> Iterator[float | None]:
        return iter((self.step_time_ms, self.memory_mib, self.power_w))

    @cached_property
    def memory_breakdown(self) -> MemoryBreakdown:
        """Memory at its peak by part, module and tensor; the step is traced for it, in seconds.

        Raises:
            UnsupportedModelError: The step cannot be traced.
        """
        if self.call is None:
            raise UnsupportedModelError(f"the step of {self.model} cannot be traced again")
        settings = StepSettings(
            Precision(self.precision), MemoryFormat(self.memory_format), Optimizer(self.optimizer)
        )
        step = self.call.trace(settings, self.batch_size)
        return step.breakdown(self.batch_size, self.device, self.memory_mib)

    def to_dict(self, *, breakdown_depth: int | None = None) -> dict[str, Any]:
        """Return plain values for JSON.

        Args:
            breakdown_depth: Levels of modules in `memory_breakdown`; None leaves it out.
        """
        values = asdict(replace(self, call=None))
        del values["call"]
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
        """The prediction that `to_dict` was of, also after JSON.

        Raises:
            KeyError, TypeError, ValueError: it was of none, or of another version's.
        """
        given = {**values}
        for name in (
            "sentence",
            "fits",
            "verdict",
            "memory_parts_mib",
        ):  # they follow from the others
            del given[name]
        given["measured"] = None  # labels are always looked up
        for name, kind in (
            ("simulated_memory", SimulatedMemory),
            ("thriftiest", Thrift),
            ("run", Run),
        ):
            part = given[name]
            given[name] = part and kind(**part)
        if given["run"] is not None:
            offers = tuple(Offer(**offer) for offer in given["run"].offers)
            given["run"] = replace(given["run"], offers=offers)
        source = given["memory_source"]
        given["memory_source"] = source and StepSource(source)
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
        rows = [(name, number_text(v), unit, spread) for name, v, unit, spread in self.figures()]
        of = f"{self.model}, batch {self.batch_size:,}"
        settings = f"{self.phase}, {self.precision}, {self.memory_format}, {self.optimizer}"
        return card(f"{of}: {self}", rows, [settings, *self.gaps(), *self.remarks])

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


def remarks_on(
    figures: Figures,
    device_name: str,
    bases: Mapping[str, str],
    settings: StepSettings,
    labelled: Sequence[StepSettings],
) -> list[str]:
    """Return what limits the figures: distance from labels, their source, unusual settings.

    Args:
        figures: The predictions.
        device_name: Name of the device as people write it.
        bases: By metric: the source of predictions without labels of the device.
        settings: Settings of the step.
        labelled: Settings of the labels, the most frequent first.
    """
    remarks = []
    if figures.unfamiliar:
        names = " and ".join(METRIC_NAMES[metric] for metric in figures.unfamiliar)
        remarks.append(f"No measured model resembles this one, so {names} may be less reliable.")
    for metric, end in figures.beyond_labels.items():
        value = getattr(figures, metric)
        most = "largest" if value > end else "smallest"
        remarks.append(
            f"Extrapolation: the {most} measured {METRIC_NAMES[metric]} was "
            f"{quantity(metric, end)}, this prediction is {quantity(metric, value)}."
        )
    by_basis: dict[str, list[str]] = {}
    for metric, basis in bases.items():
        by_basis.setdefault(basis, []).append(METRIC_NAMES[metric])
    remarks += [
        f"No model was trained on the {' and '.join(names)} of {device_name}; "
        f"{'it comes' if len(names) == 1 else 'they come'} from {basis}."
        for basis, names in by_basis.items()
    ]
    if labelled and settings not in labelled:
        given, usual = (", ".join(row) for row in (settings, labelled[0]))
        remarks.append(f"No measurement had these settings ({given}); most had: {usual}.")
    return remarks


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
