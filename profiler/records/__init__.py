"""Records that all packages share: Configuration, Graph, Protocol, Measurement.

They are frozen, hold numbers, strings and NumPy arrays, and import without torch.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from trappm.profiler.errors import InputError, MissingLibraryError, TrappmError
from trappm.profiler.files import pack, unpack

OnProgress = Callable[[int, int], None]
"""Called with the number of finished steps and of all steps."""

Watch = Callable[[int, int, str], None]
"""Called with the number of finished items, the number of all items, and the current item."""


WORKER = "worker"
"""Phase before the device is ready; failures in it are not caused by the configuration."""

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
    """Arithmetic of the step: fp32, autocast to fp16 or bf16, or bf16 for everything.

    The three of fp32 differ in where an NVIDIA GPU since Ampere may multiply in TF32.
    """

    FP32 = "fp32"
    """TF32 in convolutions and not in matrix products, which is PyTorch's default."""
    TF32 = "tf32"
    """TF32 in both, as after `torch.set_float32_matmul_precision("high")`."""
    FP32_STRICT = "fp32-strict"
    """TF32 in neither, as with `torch.backends.cudnn.allow_tf32 = False`."""
    AMP_FP16 = "amp-fp16"
    AMP_BF16 = "amp-bf16"
    BF16 = "bf16"
    """Parameters, gradients and optimizer states in bf16, without autocast."""

    @property
    def types(self) -> Precision:
        """The precision with the same types of tensors: `fp32` for the three of fp32."""
        return Precision.FP32 if self in _FP32 else self

    @property
    def is_fp32(self) -> bool:
        return self in _FP32

    @property
    def needs_bf16(self) -> bool:
        return self in (Precision.AMP_BF16, Precision.BF16)


_FP32 = (Precision.FP32, Precision.TF32, Precision.FP32_STRICT)
PRECISION_NAMES = f"{', '.join([*Precision][:-1])} or {[*Precision][-1]}"
"""All precisions, for the help of options."""


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
    ADAMW_8BIT = "adamw-8bit"
    """`AdamW8bit` of bitsandbytes, which keeps its moments in 8 bits."""

    @property
    def is_adam(self) -> bool:
        """Return whether it keeps two moments of each parameter, in the parameter's type."""
        return self in (Optimizer.ADAM, Optimizer.ADAMW)

    @property
    def states_per_parameter(self) -> int:
        """Number of states that it keeps of each parameter, of any type."""
        if self is Optimizer.ADAMW_8BIT:
            return 2
        return 2 if self.is_adam else int(self is Optimizer.MOMENTUM)

    def state_bytes(self, parameter_bytes: int, element_bytes: int = 4) -> tuple[int, ...]:
        """Return the bytes of each tensor that it keeps of a parameter, in order of allocation.

        Those in 8 bits follow `Optimizer2State.init_state` of bitsandbytes 0.50: each block of 256
        values has its absolute maximum in fp32, and the states of small parameters are in fp32.

        Args:
            parameter_bytes: Bytes of the parameter.
            element_bytes: Bytes of each of its elements.
        """
        states = self.states_per_parameter
        if self is not Optimizer.ADAMW_8BIT:
            return (parameter_bytes,) * states
        count = parameter_bytes // element_bytes
        if count < MIN_8BIT_COUNT:
            return (4 * count,) * states
        return (count,) * states + (4 * -(-count // BLOCK_OF_8_BITS),) * states

    def require_library(self) -> None:
        """Look for the library that has its class, which only a measurement needs.

        Raises:
            MissingLibraryError: It is not installed.
        """
        if self is Optimizer.ADAMW_8BIT and find_spec("bitsandbytes") is None:
            raise MissingLibraryError(
                f"{self} is measured with bitsandbytes, which is not installed; install it with: "
                "pip install bitsandbytes"
            )

    def bytes_per_update(self, element_bytes: int = 4) -> float:
        """Return the bytes that an update reads and writes per element of a large parameter.

        The weights and the states are read and written, the gradient is read.
        """
        count = 1 << 20
        states = sum(self.state_bytes(count * element_bytes, element_bytes))
        return 3 * element_bytes + 2 * states / count


MIN_8BIT_COUNT = 4096
"""Least number of elements of a parameter whose states are in 8 bits (`min_8bit_size`)."""
BLOCK_OF_8_BITS = 256
"""Number of 8-bit values that share an absolute maximum (`blocksize`)."""
OPTIMIZER_NAMES = f"{', '.join([*Optimizer][:-1])} or {[*Optimizer][-1]}"
"""All optimizers, for the help of options."""


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
    def is_fault_of_worker(self) -> bool:
        """Return whether it failed before its configuration had a part in it."""
        return self.outcome is Outcome.ERROR and self.failed_in == WORKER

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
    "high": Precision.TF32,
    "highest": Precision.FP32,
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


_NOTHING = 1e-9
"""Smaller numbers are rounding errors of zero."""


def number_text(value: float, digits: int = 4) -> str:
    """Return a number with this many significant digits, and all digits of its integer part."""
    if not math.isfinite(value):
        return f"{value}"
    size = abs(value)
    if size < _NOTHING:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(size)), 0)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# As in the test of isomorphism by Weisfeiler and Lehman (1968), a node's hash takes in those of
# its neighbours. In an acyclic graph one pass down and one pass up do what their rounds do: they
# let each node know all that it is computed from and all that is computed from it.


def graph_hash(
    operators: Sequence[str],
    edges: npt.NDArray[np.int64],
    content: npt.NDArray[np.int64],
    salt: str = "",
    signatures: Sequence[str] = (),
    edge_slots: Sequence[str] = (),
) -> str:
    """Return 64 hexadecimal digits that are equal for equal graphs in any topological order.

    Args:
        operators, edges: As in `Graph`.
        content: Further numbers of each node (N, any).
        salt, signatures, edge_slots: Further texts of the graph, of each node and of each edge.

    Raises:
        TrappmError: The nodes are not in topological order.
    """
    if np.any(edges[:, 0] >= edges[:, 1]):
        raise TrappmError("the nodes of a graph must be in topological order to be hashed")
    rows = np.ascontiguousarray(content, dtype="<i8")
    own = [
        _digest([operator.encode(), row.tobytes()])
        for operator, row in zip(operators, rows, strict=True)
    ]
    if signatures:
        own = [_digest([known, text.encode()]) for known, text in zip(own, signatures, strict=True)]
    slots = [text.encode() for text in edge_slots] or [b""] * len(edges)
    pairs = list(zip(edges.tolist(), slots, strict=True))
    producers: list[list[tuple[bytes, int]]] = [[] for _ in own]
    consumers: list[list[tuple[bytes, int]]] = [[] for _ in own]
    for (source, target), slot in pairs:
        producers[target].append((slot, source))
        consumers[source].append((slot, target))
    down, up = own.copy(), own.copy()
    for node in range(len(own)):
        down[node] = _digest([own[node], *sorted(slot + down[i] for slot, i in producers[node])])
    for node in reversed(range(len(own))):
        up[node] = _digest([own[node], *sorted(slot + up[i] for slot, i in consumers[node])])
    known = [_digest(pair) for pair in zip(down, up, strict=True)]
    links = [_digest([known[source], slot + known[target]]) for (source, target), slot in pairs]
    return _digest([salt.encode(), *sorted(known), b"", *sorted(links)]).hex()


def _digest(parts: Iterable[bytes]) -> bytes:
    sized = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    return hashlib.sha256(b"".join(sized)).digest()


IntArray = npt.NDArray[np.int64]

SHAPE_LENGTH = 6
"""Length of shapes, padded with zeros as in the paper's node features."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The computation graph of a configuration with N nodes and E edges, at its batch size."""

    operators: tuple[str, ...]
    """ONNX operator of each node, in topological order (N)."""
    edges: IntArray
    """Producer and consumer of each edge (E, 2)."""
    input_shapes: IntArray
    """Shape of each node's first input, padded with zeros (N, 6)."""
    output_shapes: IntArray
    """Shape of each node's first output, padded with zeros (N, 6)."""
    macs: IntArray
    """Multiply-accumulate operations of each node's forward pass (N)."""
    parameters: IntArray
    """Number of weights of each node (N); shared weights count at the first."""
    memory_bytes: IntArray
    """Bytes of each node's outputs and weights in fp32 (N)."""
    batch_size: int
    signatures: tuple[str, ...] = ()
    """Further properties of each node (N), by `node_signature`."""
    edge_slots: tuple[str, ...] = ()
    """Outputs and inputs that each edge connects (E)."""

    @classmethod
    def empty(cls, batch_size: int) -> Self:
        """Return a graph without nodes, for predictors that use only the batch size."""
        none, shapes = np.zeros(0, dtype=np.int64), np.zeros((0, 6), dtype=np.int64)
        return cls(
            operators=(),
            edges=np.zeros((0, 2), dtype=np.int64),
            input_shapes=shapes,
            output_shapes=shapes,
            macs=none,
            parameters=none,
            memory_bytes=none,
            batch_size=batch_size,
        )

    @property
    def node_count(self) -> int:
        return len(self.operators)

    @property
    def edge_count(self) -> int:
        return int(self.edges.shape[0])


_STRUCTURE = ("operators", "edge_slots")
_SCALED = ("input_shapes", "output_shapes", "macs", "memory_bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphTemplate:
    """The graph of an architecture at one input size, for every batch size.

    Every size is affine in the batch size (`constant + slope * batch_size`). A model for a single
    batch size has `fixed_batch_size` and slopes of zero.
    """

    operators: tuple[str, ...]
    edges: IntArray
    constant: Mapping[str, IntArray]
    """Constant part of input_shapes, output_shapes, macs and memory_bytes."""
    slope: Mapping[str, IntArray]
    """Increase per sample of the same four."""
    parameters: IntArray
    fixed_batch_size: int | None = None
    signatures: tuple[str, ...] = ()
    edge_slots: tuple[str, ...] = ()

    def at(self, batch_size: int) -> Graph:
        """Return the graph at this batch size.

        Raises:
            InputError: The batch size is below 1, or not the fixed one of the model.
        """
        if batch_size < 1:
            raise InputError(f"batch size is {batch_size}; it must be 1 or more")
        if self.fixed_batch_size is not None and batch_size != self.fixed_batch_size:
            raise InputError(
                f"the model's batch size is fixed at {self.fixed_batch_size}, not {batch_size}; "
                "export it with a dynamic batch axis to ask for other batch sizes"
            )
        sizes = {name: self.constant[name] + self.slope[name] * batch_size for name in _SCALED}
        return Graph(
            operators=self.operators,
            edges=self.edges,
            parameters=self.parameters,
            batch_size=batch_size,
            signatures=self.signatures,
            edge_slots=self.edge_slots,
            **sizes,
        )

    @classmethod
    def from_graphs(cls, first: Graph, second: Graph, third: Graph | None = None) -> Self:
        """Return the template of graphs at two batch sizes, checked at an optional third.

        Raises:
            TrappmError: They differ in structure, or are not affine in the batch size.
        """
        signatures = _common_signatures(first, second)
        step = second.batch_size - first.batch_size
        slope, constant = {}, {}
        for name in _SCALED:
            difference = getattr(second, name) - getattr(first, name)
            if np.any(difference % step):
                raise TrappmError(
                    f"{name} is not affine in the batch size; it mixes the samples of a batch"
                )
            slope[name] = difference // step
            constant[name] = getattr(first, name) - slope[name] * first.batch_size
        template = replace(
            cls.fixed(first),
            constant=constant,
            slope=slope,
            fixed_batch_size=None,
            signatures=signatures,
        )
        if third is None:
            return template
        if _common_signatures(first, third) != signatures:
            raise TrappmError(_ANOTHER_STRUCTURE)
        again = template.at(third.batch_size)
        for name in _SCALED:
            if not np.array_equal(getattr(again, name), getattr(third, name)):
                raise TrappmError(
                    f"{name} is not affine in the batch size; it mixes the samples of a batch"
                )
        return template

    @classmethod
    def fixed(cls, graph: Graph) -> Self:
        """Return a template for one batch size only."""
        return cls(
            operators=graph.operators,
            edges=graph.edges,
            constant={name: getattr(graph, name) for name in _SCALED},
            slope={name: np.zeros_like(getattr(graph, name)) for name in _SCALED},
            parameters=graph.parameters,
            fixed_batch_size=graph.batch_size,
            signatures=graph.signatures,
            edge_slots=graph.edge_slots,
        )

    def to_bytes(self) -> bytes:
        """Return a compressed NumPy archive without pickled objects."""
        arrays: dict[str, npt.NDArray[Any]] = {
            **_pack("vocabulary", "operators", self.operators),
            **_pack("signature_texts", "signatures", self.signatures),
            **_pack("slot_texts", "edge_slots", self.edge_slots),
            "edges": self.edges,
            "parameters": self.parameters,
            "fixed_batch_size": np.array(self.fixed_batch_size or 0),
        }
        arrays |= {f"constant.{name}": self.constant[name] for name in _SCALED}
        arrays |= {f"slope.{name}": self.slope[name] for name in _SCALED}
        return pack(arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        arrays = unpack(data)
        return cls(
            operators=_unpack(arrays, "vocabulary", "operators"),
            signatures=_unpack(arrays, "signature_texts", "signatures"),
            edge_slots=_unpack(arrays, "slot_texts", "edge_slots"),
            edges=arrays["edges"],
            constant={name: arrays[f"constant.{name}"] for name in _SCALED},
            slope={name: arrays[f"slope.{name}"] for name in _SCALED},
            parameters=arrays["parameters"],
            fixed_batch_size=int(arrays["fixed_batch_size"]) or None,
        )

    @property
    def content_hash(self) -> str:
        """64 hexadecimal digits, equal for graphs of one structure in any order of nodes."""
        columns = [part[name] for part in (self.constant, self.slope) for name in _SCALED]
        return graph_hash(
            self.operators,
            self.edges,
            np.column_stack([*columns, self.parameters]).astype(np.int64),
            salt=f"fixed batch size {self.fixed_batch_size}",
            signatures=self.signatures,
            edge_slots=self.edge_slots,
        )


_ANOTHER_STRUCTURE = "the graph's structure changes with the batch size"
_NUMBER = re.compile(r"(\d+)")


def _common_signatures(first: Graph, second: Graph) -> tuple[str, ...]:
    """Return the signatures of graphs of one structure at two batch sizes.

    A number that grows with the batch, as the groups of a convolution with weights for each sample
    (CondConv), becomes a line: `group=0+1n`.

    Raises:
        TrappmError: They differ in structure.
    """
    same = all(getattr(first, name) == getattr(second, name) for name in _STRUCTURE)
    if not same or not np.array_equal(first.edges, second.edges):
        raise TrappmError(_ANOTHER_STRUCTURE)
    batch_sizes = first.batch_size, second.batch_size
    return tuple(
        text if text == other else _affine_text(text, other, batch_sizes)
        for text, other in zip(first.signatures, second.signatures, strict=True)
    )


def _affine_text(first: str, second: str, batch_sizes: tuple[int, int]) -> str:
    parts = []
    first_parts, second_parts = _NUMBER.split(first), _NUMBER.split(second)
    if len(first_parts) != len(second_parts):
        raise TrappmError(_ANOTHER_STRUCTURE)
    for at_first, at_second in zip(first_parts, second_parts, strict=True):
        if at_first == at_second:
            parts.append(at_first)
            continue
        if not (at_first.isdecimal() and at_second.isdecimal()):
            raise TrappmError(_ANOTHER_STRUCTURE)
        slope, rest = divmod(int(at_second) - int(at_first), batch_sizes[1] - batch_sizes[0])
        if rest:
            raise TrappmError(_ANOTHER_STRUCTURE)
        parts.append(f"{int(at_first) - slope * batch_sizes[0]}+{slope}n")
    return "".join(parts)


def _pack(texts: str, places: str, values: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the distinct texts, and the index of each value."""
    once = sorted(set(values))
    place = {text: i for i, text in enumerate(once)}
    return {
        texts: np.array(once, dtype=np.str_),
        places: np.array([place[value] for value in values], dtype=np.int32),
    }


def _unpack(arrays: Mapping[str, Any], texts: str, places: str) -> tuple[str, ...]:
    if texts not in arrays:
        return ()
    once = [str(text) for text in arrays[texts]]
    return tuple(once[i] for i in arrays[places])
