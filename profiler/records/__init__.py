"""The plain records that all rooms share: Configuration, Graph, Protocol, Measurement.

They are frozen, hold only numbers, strings and NumPy arrays, and import without torch, so that
asking the label store or drawing a pool is quick. Whatever needs torch, timm or ONNX to *make* one
of them lives in the other modules of this room.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

from trappm.profiler.errors import InputError
from trappm.profiler.records.graph import SHAPE_LENGTH, Graph, GraphTemplate, IntArray

__all__ = [
    "METRICS",
    "SHAPE_LENGTH",
    "Configuration",
    "Graph",
    "GraphTemplate",
    "IntArray",
    "Measurement",
    "MemoryFormat",
    "Optimizer",
    "Outcome",
    "Pair",
    "Phase",
    "Precision",
    "Protocol",
    "Provenance",
    "StepSummary",
    "is_cpu_device",
]

Pair = tuple[str, int]
"""An architecture and an input size in pixels, to which a graph belongs."""


class Phase(enum.StrEnum):
    """What a step does: a whole training step, or one forward pass without gradients."""

    TRAIN = "train"
    INFER = "infer"


class Precision(enum.StrEnum):
    """Arithmetic of the step: plain fp32, autocast to fp16 or bf16, or all of it in bf16."""

    FP32 = "fp32"
    AMP_FP16 = "amp-fp16"
    AMP_BF16 = "amp-bf16"
    BF16 = "bf16"
    """Without autocast: parameters, gradients and optimizer states are bf16 themselves."""

    @property
    def needs_bf16(self) -> bool:
        """Whether the device has to compute in bf16."""
        return self in (Precision.AMP_BF16, Precision.BF16)


class MemoryFormat(enum.StrEnum):
    """Layout of the images and convolution weights."""

    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels-last"


class Optimizer(enum.StrEnum):
    """Optimizer of a training step; its states cost memory, its update costs time."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"

    @property
    def is_adam(self) -> bool:
        """Whether it keeps two moments of each parameter."""
        return self in (Optimizer.ADAM, Optimizer.ADAMW)


class Outcome(enum.StrEnum):
    """How an attempt to measure ended. Every attempt ends in one of these; none vanishes."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    UNSTABLE = "unstable"
    ERROR = "error"


class Provenance(enum.StrEnum):
    """Where a label comes from. Simulated labels never train a published snapshot."""

    MEASURED = "measured"
    IMPORTED = "imported"
    SIMULATED = "simulated"


MAX_SIZE = 1_000_000
"""Batch and input sizes beyond this are slips of the keyboard, and overflow what is computed."""


@dataclass(frozen=True, kw_only=True, order=True)
class Configuration:
    """An architecture with everything that changes the cost of its step.

    Raises:
        InputError: a batch or input size not from 1 to MAX_SIZE, or an empty architecture name.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    architecture: str
    """A timm model name, such as `resnet18`, or a transformer's, such as `hf:gpt2,lora=16`."""
    batch_size: int
    input_size: int
    """Height and width of the square input image in pixels; tokens of a transformer's sample."""
    precision: Precision = Precision.FP32
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    optimizer: Optimizer = Optimizer.SGD
    phase: Phase = Phase.TRAIN

    def __post_init__(self) -> None:
        if not self.architecture:
            raise InputError("an architecture name is empty; name a timm model, such as resnet18")
        for name in ("batch_size", "input_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; it must be a whole number of 1 or more")
            if value > MAX_SIZE:
                raise InputError(f"{name} is {value}; it must be at most {MAX_SIZE:,}")
        for name, kind in (
            ("precision", Precision),
            ("memory_format", MemoryFormat),
            ("optimizer", Optimizer),
            ("phase", Phase),
        ):
            object.__setattr__(self, name, member(name, kind, getattr(self, name)))

    @cached_property
    def id(self) -> str:
        """20 hexadecimal digits: a hash of exactly the fields above."""
        return hashlib.sha256(_canonical_json(self.to_dict()).encode()).hexdigest()[:20]

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: v.value if isinstance(v, enum.Enum) else v for k, v in values.items()}

    def __str__(self) -> str:
        size = size_text(self.architecture, self.input_size)
        parts = [f"{self.architecture} batch {self.batch_size} at {size}"]
        parts += [
            str(getattr(self, f.name)) for f in dataclasses.fields(self)
            if f.default is not dataclasses.MISSING and getattr(self, f.name) != f.default
        ]  # fmt: skip
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a measurement is taken: how many steps, how long, and when to give up.

    After `warmup_steps`, steps are timed until at least `min_steps` have been taken and either the
    relative standard error of the median is below `target_relative_error` or has stopped falling,
    or `max_steps` or `max_seconds` is reached. The paper's protocol is 5 and 50, whatever the
    noise.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "use_attribute_docstrings": True}

    name: str = "paper"
    warmup_steps: int = 5
    min_steps: int = 50
    max_steps: int = 50
    max_seconds: float = 60.0
    target_relative_error: float = 0.0
    timeout_s: float = 300.0
    """Wall time after which the measuring process is killed, model creation included."""
    power_window_s: float = 2.0
    """How long steps run at least while a GPU's energy is measured; its meter sees a part of it."""
    unstable_relative_iqr: float = 0.25
    """A run whose interquartile range exceeds this share of its median is `unstable`."""
    unstable_lost_share: float = 0.1
    """A step on cores of a host that lost a larger share of its time to other programs is rejected,
    unless too few lost less in twice `max_seconds`. A run whose steps are not judged one by one, as
    on a GPU, is `unstable`."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_steps <= self.max_steps or self.warmup_steps < 0:
            raise InputError(
                f"protocol {self.name!r} takes {self.min_steps} to {self.max_steps} steps after "
                f"{self.warmup_steps} of warm-up; it needs at least one, and a maximum not below"
            )
        if self.max_seconds < 0 or self.timeout_s <= 0:
            raise InputError(
                f"protocol {self.name!r} measures for {self.max_seconds} s and is killed after "
                f"{self.timeout_s} s; the first may not be negative, the second must be above 0"
            )
        if not 0 <= self.power_window_s <= 60:
            raise InputError(
                f"protocol {self.name!r} has a power_window_s of {self.power_window_s}; it must be "
                "from 0 to 60"
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """What the raw step samples say, in milliseconds."""

    median_ms: float
    mean_ms: float
    iqr_ms: float
    p95_ms: float
    forward_share: float | None = None
    """Share of forward pass and loss in a training step, seen in a few more steps; None if untold,
    as for inference."""
    backward_share: float | None = None
    optimizer_share: float | None = None
    """Share of the optimizer's step and of setting the gradients to zero."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of the protocol on one device: samples, summary, environment, outcome."""

    configuration: Configuration
    device: str
    """The device's key, such as `cpu-2t` or `a100`."""
    outcome: Outcome
    protocol: Protocol
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    """Wall time of the whole attempt, model creation included."""
    attempt_key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names this attempt; recording the same key twice records it once."""
    provenance: Provenance = Provenance.MEASURED
    step_samples_ms: tuple[float, ...] = ()
    step: StepSummary | None = None
    memory_mib: float | None = None
    """Peak memory of the step; what exactly was counted is in `memory_detail_mib`."""
    power_w: float | None = None
    energy_j: float | None = None
    """Energy of one step."""
    memory_detail_mib: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    """For each metric that is None: why."""
    failed_in: str | None = None
    """For outcomes other than ok: `create`, `warmup`, `measure` or `worker`."""
    message: str | None = None
    """For outcomes other than ok: what happened."""
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (("outcome", Outcome), ("provenance", Provenance)):
            object.__setattr__(self, name, member(name, kind, getattr(self, name)))

    @property
    def step_time_ms(self) -> float | None:
        return None if self.step is None else self.step.median_ms

    @property
    def samples_per_second(self) -> float | None:
        """Images that the device gets through, all of its ranks together."""
        if self.step is None:
            return None
        ranks = int(self.environment.get("world_size", 1))
        return 1000 * ranks * self.configuration.batch_size / self.step.median_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is its inverse."""
        return {
            **dataclasses.asdict(self),
            "configuration": self.configuration.to_dict(),
            "outcome": self.outcome.value,
            "provenance": self.provenance.value,
            "step_samples_ms": list(self.step_samples_ms),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            **{
                **data,
                "configuration": Configuration(**data["configuration"]),
                "protocol": Protocol(**data["protocol"]),
                "outcome": Outcome(data["outcome"]),
                "provenance": Provenance(data["provenance"]),
                "step_samples_ms": tuple(data["step_samples_ms"]),
                "step": None if data["step"] is None else StepSummary(**data["step"]),
            }
        )


METRICS: Mapping[str, str] = {"step_time_ms": "ms", "memory_mib": "MiB", "power_w": "W"}
"""The metrics a label carries and a head predicts, with their units, in the paper's order."""


Member = TypeVar("Member", bound=enum.StrEnum)


def member(name: str, kind: type[Member], value: str) -> Member:
    """Return the member of an enumeration by its text, in any case.

    Raises:
        InputError: There is none; the message lists all members.
    """
    text = value.lower() if isinstance(value, str) else value
    try:
        return kind(text)
    except ValueError as error:
        meant = _ALSO_CALLED.get(text) if kind is Precision and isinstance(text, str) else None
        hint = "" if meant is None else f"; did you mean {meant}?"
        allowed = ", ".join(kind)
        raise InputError(f"{name} is {value!r}; it must be one of {allowed}{hint}") from error


_ALSO_CALLED = {
    "amp": Precision.AMP_FP16,
    "fp16": Precision.AMP_FP16,
    "float16": Precision.AMP_FP16,
    "half": Precision.AMP_FP16,
    "mixed": Precision.AMP_FP16,
    "bfloat16": Precision.BF16,
    "float32": Precision.FP32,
}
"""Precisions by names of other libraries."""


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def size_text(architecture: str, input_size: int) -> str:
    """A size of input with its unit: `224 px`, or `512 tokens` of a transformer of text."""
    return f"{input_size} {unit_by_name(architecture)}"


_OF_IMAGES = (
    "beit", "bit", "clip", "convnext", "cvt", "data2vec-vision", "deit", "dinat", "dinov2",
    "donut-swin", "efficientnet", "focalnet", "hgnet", "hiera", "ijepa", "imagegpt", "levit",
    "metaclip", "mobilenet", "mobilevit", "poolformer", "pp-lcnet", "pvt", "regnet", "resnet",
    "segformer", "siglip", "swiftformer", "swin", "textnet", "vit",
)  # fmt: skip
"""How names of transformers begin that take images."""


def unit_by_name(architecture: str) -> str:
    """What a size counts, by the name alone: `px` of images, `tokens` of text.

    `profiler.models.sources.unit_of` also reads shapes and files.
    """
    name = architecture.partition(",")[0].rpartition("/")[2].removeprefix("hf:").lower()
    is_text = architecture.startswith("hf:") and not name.startswith(_OF_IMAGES)
    return "tokens" if is_text else "px"


def is_cpu_device(key: str) -> bool:
    """Whether this device key means cores of a host, such as `cpu-2t`, and not a GPU."""
    return key.startswith("cpu-")
