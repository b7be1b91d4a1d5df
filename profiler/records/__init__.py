"""Records that all packages share: Configuration, Graph, Protocol, Measurement.

They are frozen, hold numbers, strings and NumPy arrays, and import without torch.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from trappm.profiler.errors import InputError
from trappm.profiler.records.graph import SHAPE_LENGTH, Graph, GraphTemplate, IntArray

OnProgress = Callable[[int, int], None]
"""Called with the number of finished steps and of all steps."""

Watch = Callable[[int, int, str], None]
"""Called with the number of finished items, the number of all items, and the current item."""


__all__ = [
    "ADAPTIVE",
    "METRICS",
    "PAPER",
    "PROTOCOLS",
    "QUICK",
    "SHAPE_LENGTH",
    "Configuration",
    "Execution",
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
    "protocol_named",
]

Pair = tuple[str, int]
"""Architecture and input size in pixels, to which a graph belongs."""


class Phase(enum.StrEnum):
    """A whole training step, or one forward pass without gradients."""

    TRAIN = "train"
    INFER = "infer"


class Execution(enum.StrEnum):
    """Mode in which PyTorch runs a step."""

    EAGER = "eager"
    COMPILE = "compile"
    """`torch.compile` with inductor in its default mode."""


class Precision(enum.StrEnum):
    """Arithmetic of the step: fp32, autocast to fp16 or bf16, or bf16 for everything."""

    FP32 = "fp32"
    AMP_FP16 = "amp-fp16"
    AMP_BF16 = "amp-bf16"
    BF16 = "bf16"
    """Parameters, gradients and optimizer states in bf16, without autocast."""

    @property
    def needs_bf16(self) -> bool:
        return self in (Precision.AMP_BF16, Precision.BF16)


class MemoryFormat(enum.StrEnum):
    """Layout of images and convolution weights."""

    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels-last"


class Optimizer(enum.StrEnum):
    """Optimizer of a training step."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"

    @property
    def is_adam(self) -> bool:
        """Return whether it keeps two moments of each parameter."""
        return self in (Optimizer.ADAM, Optimizer.ADAMW)

    @property
    def states_per_parameter(self) -> int:
        """Number of tensors of a parameter's size that it keeps."""
        return 2 if self.is_adam else int(self is Optimizer.MOMENTUM)


class Outcome(enum.StrEnum):
    """End of an attempt to measure."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    UNSTABLE = "unstable"
    ERROR = "error"


class Provenance(enum.StrEnum):
    """Origin of a label. Simulated labels never train a published snapshot."""

    MEASURED = "measured"
    IMPORTED = "imported"
    SIMULATED = "simulated"


MAX_SIZE = 1_000_000
"""Larger batch and input sizes are typing errors, and overflow."""


class StepSettings(NamedTuple):
    """Settings of a step in addition to its batch size."""

    precision: Precision = Precision.FP32
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    optimizer: Optimizer = Optimizer.SGD
    execution: Execution = Execution.EAGER


@dataclass(frozen=True, kw_only=True, order=True)
class Configuration:
    """An architecture with everything that changes the cost of its step.

    Raises:
        InputError: A batch or input size not from 1 to MAX_SIZE, or an empty architecture name.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    architecture: str
    """A timm name, such as `resnet18`, or a transformer, such as `hf:gpt2,lora=16`."""
    batch_size: int
    input_size: int
    """Height and width of the image in pixels; tokens of a transformer's sample."""
    precision: Precision = Precision.FP32
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    optimizer: Optimizer = Optimizer.SGD
    phase: Phase = Phase.TRAIN
    execution: Execution = Execution.EAGER

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
            ("execution", Execution),
        ):
            object.__setattr__(self, name, member(name, kind, getattr(self, name)))

    @cached_property
    def id(self) -> str:
        """20 hexadecimal digits of a hash of all fields, without `execution` of eager steps."""
        values = self.to_dict()
        if self.execution is Execution.EAGER:  # as before there was this field
            del values["execution"]
        return hashlib.sha256(_canonical_json(values).encode()).hexdigest()[:20]

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
    """Rules of a measurement: number of steps, time, and bounds of noise.

    After `warmup_steps`, at least `min_steps` steps are timed, until the relative standard error of
    the median is below `target_relative_error` or stops falling, or `max_steps` or `max_seconds` is
    reached.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "use_attribute_docstrings": True}

    name: str = "paper"
    warmup_steps: int = 5
    min_steps: int = 50
    max_steps: int = 50
    max_seconds: float = 60.0
    target_relative_error: float = 0.0
    timeout_s: float = 300.0
    """Time after which the measuring process is killed, model creation included."""
    power_window_s: float = 2.0
    """Shortest time of steps while a GPU's energy is measured."""
    power_share: float = 1.0
    """Share of the configurations with measured power, chosen by a hash of the configuration."""
    unstable_relative_iqr: float = 0.25
    """A run with a larger interquartile range, relative to the median, is `unstable`."""
    unstable_lost_share: float = 0.1
    """Steps on CPU cores that lost a larger share of their time are rejected.

    They count only if too few others came within twice `max_seconds`. A run whose steps are not
    judged one by one, as on a GPU, is `unstable`.
    """

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
        if not 0 <= self.power_share <= 1:
            raise InputError(
                f"protocol {self.name!r} has a power_share of {self.power_share}; it must be from "
                "0 to 1"
            )

    def measures_power(self, configuration: Configuration) -> bool:
        """Return whether the configuration is among those with measured power."""
        return int(configuration.id[:8], 16) < self.power_share * 2**32

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Summary of the step samples in milliseconds."""

    median_ms: float
    mean_ms: float
    iqr_ms: float
    p95_ms: float
    forward_share: float | None = None
    """Share of forward pass and loss, from a few more steps; None if unknown."""
    backward_share: float | None = None
    optimizer_share: float | None = None
    """Share of the optimizer's step and of zeroing the gradients."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of the protocol on one device: samples, summary, environment, outcome."""

    configuration: Configuration
    device: str
    """Key of the device, such as `cpu-2t` or `a100`."""
    outcome: Outcome
    protocol: Protocol
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    """Wall time of the whole attempt, model creation included."""
    attempt_key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of this attempt; recording it twice has no effect."""
    provenance: Provenance = Provenance.MEASURED
    step_samples_ms: tuple[float, ...] = ()
    step: StepSummary | None = None
    memory_mib: float | None = None
    """Peak memory of the step; `memory_detail_mib` has what was counted."""
    power_w: float | None = None
    energy_j: float | None = None
    """Energy of one step."""
    memory_detail_mib: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    """Reason for each metric that is None."""
    failed_in: str | None = None
    """Stage of a failure: `create`, `warmup`, `measure` or `worker`."""
    message: str | None = None
    """Description of a failure."""
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (("outcome", Outcome), ("provenance", Provenance)):
            object.__setattr__(self, name, member(name, kind, getattr(self, name)))

    @property
    def step_time_ms(self) -> float | None:
        return None if self.step is None else self.step.median_ms

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of all ranks together."""
        if self.step is None:
            return None
        ranks = int(self.environment.get("world_size", 1))
        return 1000 * ranks * self.configuration.batch_size / self.step.median_ms

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` is the inverse."""
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
                "step_samples_ms": tuple(data["step_samples_ms"]),
                "step": None if data["step"] is None else StepSummary(**data["step"]),
            }
        )


METRICS: Mapping[str, str] = {"step_time_ms": "ms", "memory_mib": "MiB", "power_w": "W"}
"""Metrics of labels and heads with their units, in the paper's order."""


Member = TypeVar("Member", bound=enum.StrEnum)


def member(
    name: str, kind: type[Member], value: str, elsewhere: Mapping[str, str] | None = None
) -> Member:
    """Return the member of an enumeration by its text, in any case.

    Args:
        name: Name of the setting.
        kind: The enumeration.
        value: The text.
        elsewhere: Remarks on other texts that are common elsewhere (default: on the ways to run a
            step).

    Raises:
        InputError: There is none; the message lists all members.
    """
    text = value.lower() if isinstance(value, str) else value
    try:
        return kind(text)
    except ValueError as error:
        meant = _ALSO_CALLED.get(text) if kind is Precision and isinstance(text, str) else None
        hint = "" if meant is None else f"; did you mean {meant}?"
        known = _ELSEWHERE if elsewhere is None else elsewhere
        if isinstance(text, str) and text in known:
            hint = f"; {known[text]}"
        allowed = ", ".join(kind)
        raise InputError(f"{name} is {value!r}; it must be one of {allowed}{hint}") from error


_ELSEWHERE = {
    "reduce-overhead": "CUDA graphs are not covered",
    "max-autotune": "autotuned kernels are not covered",
    "tensorrt": "TensorRT is not covered",
    "onnxruntime": "ONNX Runtime is not covered",
    "int8": "weights of transformers in int8 are a part of the name, as in hf:NAME,int8",
    "int4": "weights of transformers in int4 are a part of the name, as in hf:NAME,int4",
}
"""Names of common values here, or the remark that they are not covered."""

_ALSO_CALLED = {
    "amp": Precision.AMP_FP16,
    "fp16": Precision.AMP_FP16,
    "float16": Precision.AMP_FP16,
    "half": Precision.AMP_FP16,
    "mixed": Precision.AMP_FP16,
    "bfloat16": Precision.BF16,
    "float32": Precision.FP32,
}
"""Names of precisions in other libraries."""


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def size_text(architecture: str, input_size: int) -> str:
    """Return an input size with its unit: `224 px`, or `512 tokens`."""
    return f"{input_size} {unit_by_name(architecture)}"


_OF_IMAGES = (
    "beit", "bit", "clip", "convnext", "cvt", "data2vec-vision", "deit", "dinat", "dinov2",
    "donut-swin", "efficientnet", "focalnet", "hgnet", "hiera", "ijepa", "imagegpt", "levit",
    "metaclip", "mobilenet", "mobilevit", "poolformer", "pp-lcnet", "pvt", "regnet", "resnet",
    "segformer", "siglip", "swiftformer", "swin", "textnet", "vit",
)  # fmt: skip
"""Prefixes of names of transformers for images."""


def unit_by_name(architecture: str) -> str:
    """Return the unit of an input size by the name alone: `px` or `tokens`."""
    name = architecture.partition(",")[0].rpartition("/")[2].removeprefix("hf:").lower()
    is_text = architecture.startswith("hf:") and not name.startswith(_OF_IMAGES)
    return "tokens" if is_text else "px"


def is_cpu_device(key: str) -> bool:
    """Return whether a device key names CPU cores, such as `cpu-2t`."""
    return key.startswith("cpu-")


PAPER = Protocol(name="paper", warmup_steps=5, min_steps=50, max_steps=50)
"""5 warm-up and 50 timed steps, whatever the noise (TraPPM, section on data collection)."""

QUICK = Protocol(
    name="quick",
    warmup_steps=2,
    min_steps=8,
    max_steps=50,
    max_seconds=2.0,
    target_relative_error=0.01,
    timeout_s=120.0,
)
"""Stops when the median is known to about 1 %; for campaigns on CPUs, where steps are slow."""

ADAPTIVE = Protocol(
    name="adaptive",
    warmup_steps=5,
    min_steps=16,
    max_steps=500,
    max_seconds=4.0,
    target_relative_error=0.002,
)
"""Stops when the median is known to 0.2 % or does not improve; for GPUs."""

PROTOCOLS = {protocol.name: protocol for protocol in (PAPER, QUICK, ADAPTIVE)}


def protocol_named(name: str) -> Protocol:
    """Return the protocol of this name.

    Raises:
        InputError: There is none.
    """
    if name not in PROTOCOLS:
        raise InputError(f"no protocol is named {name!r}; there are {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
