"""The record of a prediction: what a step of a model costs on a device, and what follows from that.

A prediction unpacks as step time, memory, power, in the order of the paper's Figure 8. The heads of
a snapshot predict these three (`answering`); throughput, what fits, energy and the cost of a whole
training follow from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from trappm.learner.physics.power.thrift import Thrift
from trappm.notebook_cards import card
from trappm.prediction.costs import Offer, Power, Run
from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.number_text import number_text
from trappm.profiler.profile_record import StepSource
from trappm.profiler.records import METRICS, is_cpu_device
from trappm.profiler.simulation.memory_simulation import SimulatedMemory

if TYPE_CHECKING:
    from trappm.learner.heads.predictions import StepSettings
    from trappm.learner.physics.power.step_power import Interval


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
    largest_batch_size: int | None = None
    mig_profile: str | None = None


UNITS = {**METRICS, "energy_j": "J", "samples_per_s": "1/s"}
"""Of all figures of a step."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction:
    """What one step costs; iterating gives step time, memory, power."""

    model: str
    device: str
    batch_size: int
    phase: str
    """`train` or `infer`."""
    precision: str
    memory_format: str
    optimizer: str
    snapshot: str
    """The id of the one that answers."""
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
    largest_batch_size: int | None = None
    """The largest of which the upper bound of its memory leaves the share of the card free that
    published runs needed; 0 if none does. `trappm fits` has the medians of the simulation."""
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

    def __iter__(self) -> Iterator[float | None]:
        return iter((self.step_time_ms, self.memory_mib, self.power_w))

    def to_dict(self) -> dict[str, Any]:
        return {
            "sentence": str(self),
            **asdict(self),
            "memory_parts_mib": self.memory_parts_mib,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The prediction that `to_dict` was of, also after JSON.

        Raises:
            KeyError, TypeError, ValueError: it was of none, or of another version's.
        """
        given = {**values}
        for name in ("sentence", "memory_parts_mib"):  # they follow from the others
            del given[name]
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
            "held by the allocator beside them": memory.reserved_mib - memory.live_mib,
            "workspace of convolutions": scratch_mib,
            CONTEXT: self.memory_mib - memory.reserved_mib - scratch_mib,
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
        for name in UNITS:
            if getattr(self, name) is None:
                unknown.setdefault(self.missing.get(name, "not known"), []).append(name)
        # What needs a figure that is missing is missing for the same reason.
        roots = [reason for reason in unknown if not reason.startswith(NEEDS)]
        for reason in [r for r in unknown if r.startswith(NEEDS) and roots]:
            unknown[roots[0]] += unknown.pop(reason)
        return [f"no {', '.join(names)}: {reason}" for reason, names in unknown.items()]

    def __repr__(self) -> str:
        return f"<Prediction: {self.model} on {self.device}, batch {self.batch_size:,}: {self}>"

    def _repr_html_(self) -> str:
        rows = [(name, number_text(v), unit, spread) for name, v, unit, spread in self.figures()]
        of = f"{self.model} on {self.device}, batch {self.batch_size:,}"
        settings = f"{self.phase}, {self.precision}, {self.memory_format}, {self.optimizer}"
        return card(f"{of}: {self}", rows, [settings, *self.gaps(), *self.remarks])

    def __str__(self) -> str:
        """The answer in a sentence."""
        parts = [part for part in (self._room(), self._pace(), self._whole_run()) if part]
        sentence = "; ".join(parts) or "nothing of it is known"
        return f"{sentence[0].upper()}{sentence[1:]}."

    def _room(self) -> str | None:
        if self.memory_mib is None:
            return None
        if self.capacity_mib is None or self.out_of_memory is None:
            return f"it takes {self.memory_mib:,.0f} MiB on {self.device}"
        unlikely, likely = SURE, 1 - SURE
        verdict = "may not fit"
        if self.out_of_memory < unlikely:
            verdict = "fits"
        elif self.out_of_memory > likely:
            verdict = "does not fit"
        gib, of_gib = self.memory_mib / 1024, self.capacity_mib / 1024
        return f"{verdict} {self.device}: {gib:.1f} of {of_gib:.1f} GiB"

    def _pace(self) -> str | None:
        if self.step_time_ms is None:
            return None
        bounds = self.intervals["step_time_ms"]
        unit, scale = ("s", 1000) if bounds[1] >= LONG_MS else ("ms", 1)
        low, high = (_number(bound / scale) for bound in bounds)
        between = f"{low} to {high}" if low != high else low
        power = "" if self.power_w is None else f" at {self.power_w:.0f} W"
        fits = self.out_of_memory is None or self.out_of_memory <= 1 - SURE
        return f"a step {'takes' if fits else 'would take'} {between} {unit}{power}"

    def _whole_run(self) -> str | None:
        run = self.run
        if run is None:
            return None
        cheapest_of = "from " if len(run.offers) > 1 else ""
        usd = f" and {cheapest_of}{_number(run.offers[0].usd)} USD" if run.offers else ""
        return f"{_number(run.hours)} h{usd} for {run.length}"


def remarks_on(
    figures: Figures,
    device: str,
    card: str,
    bases: Mapping[str, str],
    settings: StepSettings,
    labelled: Sequence[StepSettings],
) -> list[str]:
    """How far the figures are from labels, what they rest on where there are none, and what the
    card cannot do; `labelled` are the settings of labels, the most frequent first."""
    remarks = [
        f"{metric}: no label was of anything like this model, so trust it less"
        for metric in figures.unfamiliar
    ]
    for metric, end in figures.beyond_labels.items():
        value = getattr(figures, metric)
        labels, ends = bases.get(metric, f"labels of {device}"), "end" if value > end else "begin"
        answer = quantity(metric, value)
        remarks.append(
            f"{labels} {ends} at {quantity(metric, end)}; this answer of {answer} is far "
            f"{'beyond' if value > end else 'below'} them"
        )
    by_basis: dict[str, list[str]] = {}
    for metric, basis in bases.items():
        by_basis.setdefault(basis, []).append(metric)
    remarks += [f"no head of {device}: {', '.join(ms)} from {b}" for b, ms in by_basis.items()]
    listed = card_of(card)
    if settings.precision.needs_bf16 and listed is not None and not listed.has_bf16:
        remarks.append(f"{device} has no bf16 of its own, and is slower in it than this")
    if labelled and settings not in labelled:
        given, usual = (", ".join(row) for row in (settings, labelled[0]))
        remarks.append(f"no label had these settings ({given}), most had: {usual}")
    return remarks


NEEDS = "it needs "
"""How the reason of a gap begins that follows from another."""

LONG_MS = 10_000
"""Steps of so many ms are told in seconds."""

CONTEXT = "CUDA's context and libraries"
"""What memory is made of beside the step."""

SURE = 0.05
"""A probability of running out of memory below this fits, as good as surely; above 1 less this
it does not."""


def quantity(metric: str, value: float) -> str:
    """A metric's value with its unit; long step times in seconds."""
    if metric == "step_time_ms" and value >= 1000:
        return f"{_number(value / 1000)} s"
    return f"{_number(value)} {METRICS[metric]}"


def _number(value: float) -> str:
    """With two or three digits that count."""
    return number_text(value, 3 if value >= 10 else 2)
