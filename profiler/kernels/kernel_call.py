"""One operator with its shapes, types and layout, which is timed to characterize a device.

    KernelCall --running--> a function on a real device, timed by `characterising`
               --traced---> a KernelProfile, by the recorder of whole steps

Times of kernel calls are evidence for the same constants of a device as times of steps. The record
needs no torch; its text identifies it in files and in SQL:

    conv2d batch=32 inputs=64 outputs=64 height=56 window=3 stride=1 groups=1 fp16 channels-last

A `KernelMeasurement` is a call timed on a device. Its time includes the launch: a kernel shorter
than its launch takes as long as the launch.
"""

from __future__ import annotations

import dataclasses
import enum
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeVar

from trappm.profiler.errors import InputError
from trappm.profiler.records import MemoryFormat, Optimizer, Outcome, Protocol, Provenance, member

MAX_SIZE = 1 << 32
"""Larger sizes are damage or typing errors."""
_MAX_TEXT = 500


class Operator(enum.StrEnum):
    """Operator of a call; `FORMS` has the sizes of each."""

    LINEAR = "linear"
    """(batch, rows, inputs) times (inputs, outputs), with bias."""
    MATMUL = "matmul"
    """`batch` products of (rows, depth) and (depth, columns)."""
    CONV2D = "conv2d"
    """Square images and windows, padded by `padding` on all sides, without bias."""
    BATCH_NORM = "batch-norm"
    """Normalization in training, with statistics of the batch."""
    FROZEN_BATCH_NORM = "frozen-batch-norm"
    """Normalization in inference, with stored statistics."""
    LAYER_NORM = "layer-norm"
    SOFTMAX = "softmax"
    """Over the last axis."""
    ATTENTION = "attention"
    """Fused; queries, keys and values of one length, without mask."""
    ADD = "add"
    ADD_SCALAR = "add-scalar"
    MULTIPLY = "multiply"
    MULTIPLY_SCALAR = "multiply-scalar"
    DIVIDE = "divide"
    DIVIDE_SCALAR = "divide-scalar"
    POWER = "power"
    """Power of positive tensors."""
    POWER_SCALAR = "power-scalar"
    """The square."""
    RELU = "relu"
    GELU = "gelu"
    TANH = "tanh"
    ADD_CHANNELS = "add-channels"
    """Adds a number for each channel to images: a broadcast."""
    ADD_LAYOUTS = "add-layouts"
    """Adds images to others of the other layout."""
    CAST = "cast"
    """Conversion from fp32 to the 16 bits of the call."""
    COPY = "copy"
    """Copy into existing memory."""
    RELAYOUT = "relayout"
    """Copies images into the other layout."""
    FILL = "fill"
    """Writes zeros into existing memory."""
    MEAN = "mean"
    """Mean of each channel's pixels."""
    MAX_POOL = "max-pool"
    EMBEDDING = "embedding"
    """Rows of a table, by number."""
    SGD = "sgd"
    """An optimizer's step over `tensors` of `elements` each; also the next two."""
    MOMENTUM = "momentum"
    ADAM = "adam"
    ALL_REDUCE = "all-reduce"
    """Over a tensor of `elements` in each of the ranks; also the next two."""
    ALL_GATHER = "all-gather"
    """Gather into a tensor of `elements`, of which each rank has a share."""
    REDUCE_SCATTER = "reduce-scatter"
    """Sum of a tensor of `elements`; each rank gets a share."""
    LAUNCH = "launch"
    """`kernels` on one element each, one after the other."""


class DataType(enum.StrEnum):
    """Type of the tensors that are read and written."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Direction(enum.StrEnum):
    """The forward pass, the whole backward pass, or one of its gradients."""

    FORWARD = "forward"
    BACKWARD = "backward"
    DATA_GRADIENT = "data-gradient"
    WEIGHT_GRADIENT = "weight-gradient"


@dataclass(frozen=True)
class Form:
    """Sizes and settings of an operator."""

    sizes: tuple[str, ...]
    is_product: bool = False
    """Multiplies matrices, so TF32 may be used."""
    is_collective: bool = False
    """Needs several ranks."""
    has_images: bool = False
    directions: tuple[Direction, ...] = (Direction.FORWARD, Direction.BACKWARD)
    types: tuple[DataType, ...] = tuple(DataType)


_FORWARD = (Direction.FORWARD,)
_IMAGES = ("batch", "channels", "height")
_ROWS = Form(("batch", "width"))
_ONE_WAY = Form(("batch", "width"), directions=_FORWARD)
_COLLECTIVE = Form(
    ("ranks", "elements"), is_collective=True, directions=_FORWARD, types=(DataType.FP32,)
)
_OPTIMIZER = Form(("tensors", "elements"), directions=_FORWARD, types=(DataType.FP32,))

FORMS: Mapping[Operator, Form] = {
    **dict.fromkeys(Operator, _ONE_WAY),
    **dict.fromkeys(
        (Operator.SOFTMAX, Operator.LAYER_NORM, Operator.RELU, Operator.GELU, Operator.TANH), _ROWS
    ),
    Operator.LINEAR: Form(
        ("batch", "rows", "inputs", "outputs"), is_product=True, directions=tuple(Direction)
    ),
    Operator.MATMUL: Form(("batch", "rows", "depth", "columns"), is_product=True),
    Operator.CONV2D: Form(
        ("batch", "inputs", "outputs", "height", "window", "stride", "groups"),
        is_product=True,
        has_images=True,
        directions=tuple(Direction),
    ),
    Operator.BATCH_NORM: Form(_IMAGES, has_images=True),
    Operator.FROZEN_BATCH_NORM: Form(_IMAGES, has_images=True, directions=_FORWARD),
    Operator.ATTENTION: Form(("batch", "heads", "length", "width"), is_product=True),
    Operator.ADD_CHANNELS: Form(_IMAGES, has_images=True, directions=_FORWARD),
    Operator.ADD_LAYOUTS: Form(_IMAGES, has_images=True, directions=_FORWARD),
    Operator.CAST: Form(
        ("batch", "width"), directions=_FORWARD, types=(DataType.FP16, DataType.BF16)
    ),
    Operator.RELAYOUT: Form(_IMAGES, has_images=True, directions=_FORWARD),
    Operator.MEAN: Form(_IMAGES, has_images=True),
    Operator.MAX_POOL: Form((*_IMAGES, "window", "stride"), has_images=True),
    Operator.EMBEDDING: Form(("batch", "length", "entries", "width")),
    Operator.SGD: _OPTIMIZER,
    Operator.MOMENTUM: _OPTIMIZER,
    Operator.ADAM: _OPTIMIZER,
    Operator.ALL_REDUCE: _COLLECTIVE,
    Operator.ALL_GATHER: _COLLECTIVE,
    Operator.REDUCE_SCATTER: _COLLECTIVE,
    Operator.LAUNCH: Form(("kernels",), directions=_FORWARD, types=(DataType.FP32,)),
}
_OPTIMIZERS = {Operator(o.value): o for o in (Optimizer.SGD, Optimizer.MOMENTUM, Optimizer.ADAM)}
_TF32 = "tf32"
Kind = TypeVar("Kind", bound=enum.StrEnum)


@dataclass(frozen=True, order=True)
class KernelCall:
    """An operator with everything that changes its time on a device.

    Raises:
        InputError: Wrong sizes, channels that the groups do not divide, or a type, direction,
            layout or TF32 that the operator does not have.
    """

    operator: Operator
    sizes: tuple[int, ...]
    """Sizes in the order of `FORMS`."""
    data_type: DataType = DataType.FP32
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    """Layout of images."""
    direction: Direction = Direction.FORWARD
    tf32: bool = False
    """True if a product of fp32 tensors may be computed in TF32."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("operator", Operator),
            ("data_type", DataType),
            ("memory_format", MemoryFormat),
            ("direction", Direction),
        ):
            object.__setattr__(self, name, member(name, kind, getattr(self, name)))
        object.__setattr__(self, "sizes", tuple(self.sizes))
        fault = self._fault()
        if fault is not None:
            raise InputError(f"no kernel call {self.operator} {self.sizes}: {fault}")

    @classmethod
    def of(
        cls,
        operator: Operator,
        data_type: DataType = DataType.FP32,
        memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
        direction: Direction = Direction.FORWARD,
        *,
        tf32: bool = False,
        **sizes: int,
    ) -> Self:
        """Return a call with its sizes by name.

        Raises:
            InputError: As the class; a size is missing or unknown.
        """
        operator = member("operator", Operator, operator)
        ordered = _in_order(operator, sizes)
        return cls(operator, ordered, data_type, memory_format, direction, tf32)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the call of a text.

        Raises:
            InputError: The text is not that of a call.
        """
        name, *words = text[:_MAX_TEXT].split()[:20] or [""]
        operator = member("operator", Operator, name)
        pairs = (word.split("=", 1) for word in words if "=" in word)
        sizes = {name: _whole(number) for name, number in pairs}
        settings = {word for word in words if "=" not in word}
        call = cls(
            operator,
            _in_order(operator, sizes),
            _only(settings, DataType, DataType.FP32),
            _only(settings, MemoryFormat, MemoryFormat.CONTIGUOUS),
            _only(settings, Direction, Direction.FORWARD),
            tf32=_TF32 in settings,
        )
        if call.text != text:
            raise InputError(
                f"invalid kernel call {text[:_MAX_TEXT]!r}; the canonical form is {call.text!r}"
            )
        return call

    @cached_property
    def text(self) -> str:
        """Operator, sizes by name, type, and settings other than the default."""
        form = FORMS[self.operator]
        words = [self.operator.value]
        words += [f"{name}={size}" for name, size in zip(form.sizes, self.sizes, strict=True)]
        words.append(self.data_type)
        if self.memory_format is not MemoryFormat.CONTIGUOUS:
            words.append(self.memory_format)
        if self.direction is not Direction.FORWARD:
            words.append(self.direction)
        if self.tf32:
            words.append(_TF32)
        return " ".join(words)

    def __str__(self) -> str:
        return self.text

    def __getitem__(self, name: str) -> int:
        """Return a size by its name."""
        return self.sizes[FORMS[self.operator].sizes.index(name)]

    @property
    def form(self) -> Form:
        return FORMS[self.operator]

    @property
    def padding(self) -> int:
        """Padding of a window: half of its size, rounded down."""
        return (self["window"] - 1) // 2

    @property
    def batch_size(self) -> int:
        """Batch size; 1 for optimizers and launches."""
        return self["batch"] if "batch" in self.form.sizes else 1

    @property
    def optimizer(self) -> Optimizer | None:
        return _OPTIMIZERS.get(self.operator)

    def with_batch(self, batch_size: int) -> Self:
        if "batch" not in self.form.sizes:
            return self
        return dataclasses.replace(self, sizes=(batch_size, *self.sizes[1:]))

    def _fault(self) -> str | None:
        form = self.form
        if len(self.sizes) != len(form.sizes):
            return f"it has the sizes {', '.join(form.sizes)}"
        for name, size in zip(form.sizes, self.sizes, strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
                return f"{name} is {size!r}; it must be a whole number from 1 to {MAX_SIZE:,}"
        if self.data_type not in form.types:
            return f"it is not computed in {self.data_type}"
        if self.direction not in form.directions:
            return f"it has no {self.direction} pass of its own"
        if self.memory_format is not MemoryFormat.CONTIGUOUS and not form.has_images:
            return f"it has no images to be {self.memory_format}"
        if self.tf32 and not (form.is_product and self.data_type is DataType.FP32):
            return "TF32 is for products of fp32 tensors"
        if form.is_collective and self["elements"] % self["ranks"]:
            return f"{self['ranks']} ranks do not divide its elements"
        if self.operator is Operator.CONV2D and (
            self["inputs"] % self["groups"] or self["outputs"] % self["groups"]
        ):
            return f"{self['groups']} groups do not divide its channels"
        return None


def _in_order(operator: Operator, sizes: Mapping[str, int]) -> tuple[int, ...]:
    names = FORMS[operator].sizes
    if sizes.keys() != set(names):
        raise InputError(f"{operator} has the sizes {', '.join(names)}, not {', '.join(sizes)}")
    return tuple(sizes[name] for name in names)


def _only(words: set[str], kind: type[Kind], otherwise: Kind) -> Kind:
    """Return the member of an enumeration among the words, or the default."""
    return next((kind(word) for word in sorted(words & set(kind))), otherwise)


def _whole(number: str) -> int:
    if not (number.isascii() and number.isdecimal() and len(number) < 20):
        raise InputError(f"a size is {number!r}; it must be a whole number")
    return int(number)


@dataclass(frozen=True, kw_only=True)
class KernelMeasurement:
    """Result of timing a kernel call repeatedly."""

    call: KernelCall
    device: str
    """Key of the device, such as `cpu-2t` or `a100`."""
    outcome: Outcome
    protocol: Protocol
    """One step is one call."""
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    """Wall time, including the creation of tensors."""
    attempt_key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of this attempt; recording it twice has no effect."""
    provenance: Provenance = Provenance.MEASURED
    samples_ms: tuple[float, ...] = ()
    time_ms: float | None = None
    """Median, or the value of a source without samples."""
    iqr_ms: float | None = None
    power_w: float | None = None
    """Mean over the window, idle power included."""
    energy_j: float | None = None
    """Energy of one call."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Reason for each metric that is None."""
    failed_in: str | None = None
    """Stage of the failure: `create`, `warmup`, `measure` or `worker`; None if ok."""
    message: str | None = None
    """Reason for an outcome other than ok."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Observations during this call: clocks, lost processor time, the meter."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Facts of all calls of a run: hardware, software, preparation."""

    def __post_init__(self) -> None:
        for name, kind in (("outcome", Outcome), ("provenance", Provenance)):
            object.__setattr__(self, name, member(name, kind, getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` is the inverse."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **values,
            "call": self.call.text,
            "outcome": self.outcome.value,
            "protocol": self.protocol.to_dict(),
            "provenance": self.provenance.value,
            "samples_ms": list(self.samples_ms),
            "missing": dict(self.missing),
            "facts": dict(self.facts),
            "environment": dict(self.environment),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the measurement of `to_dict`.

        Raises:
            InputError: Unknown call, outcome or protocol.
        """
        return cls(
            **{
                **data,
                "call": KernelCall.from_text(data["call"]),
                "protocol": Protocol(**data["protocol"]),
                "samples_ms": tuple(data["samples_ms"]),
            }
        )
