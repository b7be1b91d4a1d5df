"""The campaign file: a short YAML file that says what to measure, on which devices and how much.

It is checked strictly before anything starts: an unknown key, a wrong type or an impossible budget
is an error of one line. A preset is such a file that ships with the package.

`load_file` reads any YAML file that a pydantic model describes, with one line per fault; the error
for an unknown key suggests the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from trappm.profiler.devices.catalogue import rank_key
from trappm.profiler.errors import CampaignError, InputError, TrappmError, fault_text
from trappm.profiler.files import load_yaml, read_plain
from trappm.profiler.measuring.canary import LARGE, CanaryPlan
from trappm.profiler.models.pool import PoolSpec
from trappm.profiler.records import (
    METRICS,
    PROTOCOLS,
    Configuration,
    is_cpu_device,
    protocol_named,
)
from trappm.profiler.records import Protocol as MeasuringProtocol

if TYPE_CHECKING:
    from trappm.store import CampaignRecord

ALL = "all"
"""Strategy of a campaign that measures its whole pool."""
ANY_GPU = "gpu"
"""Device of a learner that takes a GPU of any kind."""
MIN_TRAINING_LABELS = 4
"""A device with fewer training labels gets no heads."""
_PRESETS = resources.files("trappm.cluster") / "presets"

MAX_FILE_BYTES = 1 << 20

BRANCH = "<"
"""Begins the tags of a union's branches, which are no keys of a file."""

_UNKNOWN_KEY = frozenset(["extra_forbidden", "unexpected_keyword_argument"])
_MISSING_KEY = frozenset(["missing", "missing_argument", "missing_keyword_only_argument"])

Model = TypeVar("Model", bound=BaseModel)


def runs_nothing(device: str) -> bool:
    """Return whether a device is simulated or replayed, so that a campaign on it is a rehearsal."""
    return device.startswith(("simulated:", "replay:"))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Named = Annotated[str, Tag("<name>")]
"""The name of something built in or built before, where its own description may stand instead."""


def _tag(value: object) -> str:
    return "<name>" if not isinstance(value, dict | PoolSpec | MeasuringProtocol) else "<own>"


def _location(text: str) -> str:
    from trappm.learner.snapshots.registry import check_location

    check_location(text)
    return text


DeviceKey = Annotated[str, Field(min_length=1, max_length=64)]
"""A key of `profiler.devices`, such as `a100`, `simulated:a100` or `replay:FILE`."""


class Devices(_Section):
    """Devices to measure: a source and, if transfer is wanted, a target."""

    source: DeviceKey
    """Device that is measured most, such as `a100`, `simulated:a100` or `replay:FILE`."""
    target: DeviceKey | None = None
    """Device whose heads start from those of the source."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.source,) if self.target is None else (self.source, self.target)


class Share(_Section):
    """A number of configurations to measure on each of the two devices."""

    source: int = Field(ge=0, le=1_000_000)
    """Number of configurations on the source device."""
    target: int = Field(default=0, ge=0, le=1_000_000)
    """Number of configurations on the target device."""

    def on(self, device: str, devices: Devices) -> int:
        return self.source if device == devices.source else self.target


class Workers(_Section):
    """The most workers that the campaign has at once on each device."""

    source: int = Field(default=16, ge=1, le=10_000)
    """Number of workers on the source device."""
    target: int = Field(default=16, ge=1, le=10_000)
    """Number of workers on the target device."""

    def on(self, device: str, devices: Devices) -> int:
        return self.source if device == devices.source else self.target


class Evaluation(Share):
    """The evaluation set: drawn uniformly from architectures that training never sees."""

    source: int = Field(ge=2, le=1_000_000)
    """Number of configurations on the source device, 2 or more."""
    architecture_share: float = Field(default=0.2, gt=0, lt=0.9)
    """Share of the pool's architectures that are held out."""


class Rounds(Share):
    """The rounds in which acquisition picks, and how much each device measures per round."""

    count: int = Field(ge=0, le=10_000)
    """Number of rounds."""


class StopRules(BaseModel):
    """The first of these that holds ends a campaign; None means that it never does.

    What is being measured then is still kept; what is only planned is left unmeasured.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    target_mape: Mapping[str, PositiveFloat] | None = None
    """Target error by metric in percent; all must be reached on every device."""
    confidence: float = Field(default=0.9, gt=0.5, lt=1.0)
    """Confidence with which each mean error is below its target."""
    labels: PositiveInt | None = None
    """Number of labels on all devices, the evaluation set included."""
    gpu_hours: PositiveFloat | None = None
    """Hours of measuring on GPUs, failed attempts included; on CPUs if all devices are CPUs."""
    price_per_gpu_hour: PositiveFloat | None = None
    """Price of a GPU for an hour, in any currency; only reported."""
    ends_at: AwareDatetime | None = None
    """Time at which the campaign ends, with a time zone."""

    @field_validator("target_mape")
    @classmethod
    def _check_metrics(cls, targets: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if unknown := sorted(set(targets or ()) - set(METRICS)):
            raise ValueError(f"no metric {unknown[0]!r}; there are: {', '.join(METRICS)}")
        return targets

    def budgets(
        self, labels: int, seconds: float, devices: Sequence[str]
    ) -> list[tuple[str, float, float]]:
        """Return name, limit and amount spent of each budget.

        Args:
            labels: Number of labels.
            seconds: Seconds of measuring, as from `budget_seconds`.
            devices: Device keys of the campaign.
        """
        hours = "CPU-hours" if _are_cpus(devices) else "GPU-hours"
        known = (
            ("labels", self.labels, float(labels)),
            (hours, self.gpu_hours, seconds / 3600),
        )
        return [(name, float(limit), spent) for name, limit, spent in known if limit is not None]


class SecondsByKind(NamedTuple):
    """Seconds of measuring by kind of device."""

    gpu: float
    """Seconds on GPUs, simulated and replayed ones included."""
    cpu: float

    @classmethod
    def of(cls, seconds: Mapping[str, float]) -> Self:
        """Return the sums of seconds by device key."""
        on_cpus = sum(own_s for device, own_s in seconds.items() if is_cpu_device(device))
        return cls(sum(seconds.values()) - on_cpus, on_cpus)


def budget_seconds(seconds: Mapping[str, float], devices: Sequence[str]) -> float:
    """Return the seconds of measuring that `gpu_hours` limits.

    Args:
        seconds: Seconds of measuring by device key.
        devices: Device keys of the campaign.
    """
    kinds = SecondsByKind.of(seconds)
    return kinds.cpu if _are_cpus(devices) else kinds.gpu


def _are_cpus(devices: Sequence[str]) -> bool:
    return all(map(is_cpu_device, devices))


class CampaignBudget(BaseModel):
    """Part of a campaign file: how much is measured where, and what ends the campaign early.

    Reading this alone from a stored file needs neither torch nor the version that wrote it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    devices: Devices
    """Devices to measure on."""
    evaluation: Evaluation
    """The evaluation set."""
    initial: Share
    """The first training set, chosen without labels; 4 or more on the source."""
    rounds: Rounds
    """Further training sets, each chosen with the labels so far."""
    stop: StopRules | None = None
    """Rules that end the campaign before its last round."""
    max_workers: Workers = Field(default_factory=Workers)
    """The most workers at once, so that others find free GPUs."""

    @classmethod
    def of(cls, campaign: CampaignRecord) -> Self:
        """Return what the file that a campaign was launched from says about this.

        Raises:
            CampaignError: Another version launched it, and this one cannot read its file.
        """
        try:
            return cls.model_validate(campaign.spec)
        except (ValidationError, TrappmError) as error:
            raise CampaignError(
                f"campaign {campaign.id} was launched by another version, whose file this one "
                "cannot read; continue with that version, or launch the campaign under another name"
            ) from error

    def shares(self, device: str) -> list[int]:
        """Return the number of configurations per round on a device: evaluation, initial, ..."""
        rounds = (self.evaluation, self.initial, *[self.rounds] * self.rounds.count)
        return [share.on(device, self.devices) for share in rounds]

    def budget(self, device: str) -> int:
        """Return the number of configurations that the campaign measures on a device."""
        return sum(self.shares(device))

    @property
    def total(self) -> int:
        """Number of configurations on all devices."""
        return sum(map(self.budget, self.devices.keys))


class CampaignSpec(CampaignBudget):
    """Everything that decides the course of a campaign."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the campaign."""
    seed: int = Field(default=1337, ge=0, lt=2**32)
    """Seed of everything random."""
    protocol: Annotated[Named | Annotated[MeasuringProtocol, Tag("<own>")], Discriminator(_tag)] = (
        "quick"
    )
    """Name of a built-in protocol, or your own under another name."""
    power_share: float | None = Field(default=None, ge=0, le=1)
    """Share of the configurations whose power is measured (default: the protocol's)."""
    learner: str = "laptop"
    """Preset of encoder and heads."""
    learner_device: DeviceKey | None = None
    """GPU that the learner reserves on a cluster, such as `a100`, or `gpu` for any; it computes on
    that node's cores (default: none, it runs next to the campaign)."""
    strategy: str = "ours"
    """Acquisition strategy; `all` measures the whole pool on one device, without a budget."""
    cost: bool = False
    """True if strategy `ours` divides by the predicted step time."""
    max_attempts: int = Field(default=3, ge=1, le=10)
    """Number of failures of a configuration after which it is abandoned (timeouts: two at most)."""
    canary: CanaryPlan | None = Field(default_factory=CanaryPlan)
    """Repeated reference measurement that detects drift; `false` or `null`: none."""
    registry: Annotated[str, Field(max_length=1000), AfterValidator(_location)] | None = None
    """Shared folder, or URL such as `s3://bucket/path`, where encoder and snapshot are published
    (default: `TRAPPM_HOME` of the host that runs the campaign)."""
    pool: Annotated[Named | Annotated[PoolSpec, Tag("<own>")], Discriminator(_tag)]
    """Name of a built pool, or `groups` of architectures."""

    @model_validator(mode="before")
    @classmethod
    def _all_without_a_budget(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("strategy") != ALL:
            return given
        most = {"source": 1_000_000}  # `planner.with_whole_pool` sets the numbers of the pool
        return {"evaluation": most, "initial": most, "rounds": {"count": 0, **most}} | given

    @field_validator("pool", mode="before")
    @classmethod
    def _named_or_own_pool(cls, pool: object) -> object:
        if isinstance(pool, dict) and "name" in pool:
            raise ValueError("give the name of a built pool (pool: NAME) or groups, not both")
        return pool

    @field_validator("canary", mode="before")
    @classmethod
    def _read_no_canary(cls, given: object) -> object:
        return None if given is False else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # Imported here: both pull in torch, and reading a file that fails earlier should be quick.
        from trappm.learner.acquisition import strategy_named
        from trappm.learner.paper.presets import preset_named

        if isinstance(self.protocol, str):
            protocol_named(self.protocol)
        elif self.protocol.name in PROTOCOLS:
            raise ValueError(
                f"protocol: {self.protocol.name!r} is a built-in protocol; rename yours"
            )
        head = preset_named(self.learner).head
        if self.cost and self.strategy == ALL:
            raise ValueError("cost: true needs strategy: ours, not all")
        strategy_named(self.learner_strategy, cost=self.cost)
        if self.strategy == ALL and self.devices.target is not None:
            raise ValueError("devices: strategy all measures one device; leave target out")
        if self.strategy == "uncertainty" and head.members == 1 and not head.physical_prior:
            raise ValueError(
                f"strategy: uncertainty needs networks that disagree, and learner {self.learner} "
                "is a single one; take learner: paper-ensemble"
            )
        if self.devices.target == self.devices.source:
            raise ValueError("devices: source and target are the same; leave target out")
        members = [rank_key(device).member for device in self.devices.keys]
        if len(set(members)) < len(members):
            raise ValueError(
                f"devices: {' and '.join(self.devices.keys)} would wait for each other's GPUs; "
                "measure them in two campaigns"
            )
        if (device := self.learner_device) is not None and (
            is_cpu_device(device) or runs_nothing(device) or rank_key(device).ranks > 1
        ):
            raise ValueError(
                f"learner_device: {device} is not a GPU; name one such as a100, take gpu for any, "
                "or leave it out"
            )
        if self.initial.source < MIN_TRAINING_LABELS:
            raise ValueError(
                f"initial: source is {self.initial.source}; heads need {MIN_TRAINING_LABELS} or "
                "more"
            )
        shares = (self.evaluation.target, self.initial.target, self.rounds.target)
        if self.devices.target is None and any(shares):
            raise ValueError("a budget is given for a target, but devices names no target")
        if self.devices.target is not None and min(shares[:2]) < 2:
            raise ValueError("evaluation and initial need 2 or more on the target device")
        return self

    @property
    def learner_strategy(self) -> str:
        """Name of the strategy by which the learner chooses; a whole pool is in random order."""
        return "random" if self.strategy == ALL else self.strategy

    @property
    def remarks(self) -> list[str]:
        """Remarks on what suits CPUs and is measured on GPUs, a line each."""
        gpus = [d for d in self.devices.keys if not (is_cpu_device(d) or runs_nothing(d))]
        canary = self.canary and self.canary.configuration
        remarks = []
        if gpus and self.protocol == "quick":
            remarks.append(
                f"protocol quick is for CPUs; on {' and '.join(gpus)}, protocol adaptive finds the "
                "median to 0.2 % instead of 1 %"
            )
        if gpus and canary and _samples(canary) < _samples(LARGE) / 4:
            remarks.append(
                f"the canary {canary} is small for {' and '.join(gpus)}: it hardly shows a slower "
                f"clock; without canary.configuration it is {LARGE}"
            )
        return remarks

    @property
    def measuring_protocol(self) -> MeasuringProtocol:
        own = protocol_named(self.protocol) if isinstance(self.protocol, str) else self.protocol
        if self.power_share is not None:
            own = dataclasses.replace(own, power_share=self.power_share)
        if own in PROTOCOLS.values():
            return own
        # Labels of one protocol name may be mixed, so the name depends on what the protocol says.
        rules = own.to_dict()
        if own.power_share == 1:  # so that earlier names stay valid
            del rules["power_share"]
        digest = hashlib.sha256(json.dumps(rules).encode()).hexdigest()[:8]
        return dataclasses.replace(own, name=f"{own.name}-{digest}")


def _samples(configuration: Configuration) -> int:
    """Return the pixels of a batch of images, as a measure of its work."""
    return configuration.batch_size * configuration.input_size**2


def presets() -> list[str]:
    """Return names of the campaign files that ship with the package."""
    return sorted(
        f.name.removesuffix(".yaml") for f in _PRESETS.iterdir() if f.name.endswith(".yaml")
    )


def load_preset(name: str) -> CampaignSpec:
    """Load a preset, with the pool of `laptop` if it has none; an unknown name is an InputError."""
    if name not in presets():
        raise InputError(f"no preset {name!r}; there are: {', '.join(presets())}")
    values = _preset_values(name)
    return CampaignSpec.model_validate({"pool": _preset_values("laptop")["pool"], **values})


def _preset_values(name: str) -> dict[str, Any]:
    text = (_PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = load_yaml(text, f"preset {name}")
    return values


def load_spec(path: Path) -> CampaignSpec:
    """Load a file; raise InputError if it cannot be read or is not a valid campaign file."""
    return load_file(path, CampaignSpec, kind="campaign")


def parse_spec(text: str, *, origin: str) -> CampaignSpec:
    """Return the campaign spec that a YAML text describes.

    >>> spec = load_preset("laptop")
    >>> spec.devices.source, spec.rounds.count
    ('cpu-2t', 3)

    Raises:
        InputError: Not YAML, or not a campaign; the message names faults and their keys.
    """
    return parse_text(text, CampaignSpec, origin=origin, kind="campaign")


class FileFaultsError(InputError):
    """A file with faults: one line per fault, which begins with its key, the main one first."""

    def __init__(self, origin: str, faults: Sequence[str]) -> None:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"{origin}: {faults[0]}{more}")
        self.faults = tuple(faults)


def load_file(path: Path, model: type[Model], *, kind: str) -> Model:
    """Return the record that a YAML file describes.

    Raises:
        InputError: The file cannot be read, is too large, or is not what the model says.
    """
    try:
        text = read_plain(path, MAX_FILE_BYTES).decode("utf-8")
    except InputError as error:
        raise InputError(f"the {kind} file: {error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read the {kind} file {path}: {error}") from error
    return parse_text(text, model, origin=str(path), kind=kind)


def parse_text(text: str, model: type[Model], *, origin: str, kind: str) -> Model:
    """Return the record that a YAML text describes; errors name its origin and its kind.

    Raises:
        InputError: Not YAML, or not a mapping.
        FileFaultsError: Not what the model says.
    """
    data = load_yaml(text, origin)
    if not isinstance(data, dict):
        raise InputError(f"{origin} is not a {kind} file: it must be a mapping of keys to values")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise FileFaultsError(origin, _faults(error, model, kind)) from error
    except InputError as error:
        raise FileFaultsError(origin, [str(error)]) from error


def _faults(error: ValidationError, model: type[BaseModel], kind: str) -> list[str]:
    """Return one line per fault, unknown keys first."""
    faults = sorted(error.errors(), key=lambda fault: fault["type"] not in _UNKNOWN_KEY)
    known = set(_keys(model.model_json_schema()))
    misspelt: set[tuple[Any, ...]] = set()
    lines = []
    for fault in faults:
        location = tuple(part for part in fault["loc"] if not str(part).startswith(BRANCH))
        message = fault_text(fault)
        if fault["type"] in _UNKNOWN_KEY:
            name = str(location[-1])
            near = difflib.get_close_matches(name, sorted(known - {name}), n=1)
            message = "unknown key" + (f"; did you mean {near[0]!r}?" if near else "")
            misspelt |= {(*location[:-1], key) for key in near}
        elif fault["type"] in _MISSING_KEY and location in misspelt:
            continue  # the misspelt key explains it
        lines.append(f"{'.'.join(map(str, location)) or kind}: {message}")
    return lines


def _keys(schema: Any) -> Iterator[str]:
    """Yield the names of all properties in a JSON schema."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        schema = schema.values()
    elif not isinstance(schema, list):
        return
    for part in schema:
        yield from _keys(part)
