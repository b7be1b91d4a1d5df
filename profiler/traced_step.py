"""One step of a model as it was traced, and the cache of such steps. Needs NumPy only.

A trace has three parts: the graph (`profiler.records`), the allocations of the step, and its
kernels. A kernel is one launch on a GPU, or one loop over tensors on a CPU; equal kernels are one
row with a count. All sizes are affine in the batch size, so a trace holds for every batch size.

A step is traced once for `trappm predict`, campaigns, servers and pools. The cache has one key, one
interface, and two homes: a folder here, a table in `store`. The key has all that the trace depends
on. Entries only save time: a damaged one is made again, and deleting them loses nothing.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from trappm.profiler.errors import TrappmError
from trappm.profiler.files import pack, report_damage, unpack, write_atomically
from trappm.profiler.host.environment import library_versions, uses_fused_attention
from trappm.profiler.models.known_names import content_of
from trappm.profiler.records import (
    Configuration,
    Execution,
    GraphTemplate,
    IntArray,
    MemoryFormat,
    Phase,
    Precision,
    StepSettings,
)


class Event(IntEnum):
    """Event of the allocator."""

    ALLOCATE = 0
    FREE = 1
    WORKSPACE = 2
    """A convolution runs and needs scratch memory; the size is that of the bytes it touches."""
    END_OF_FORWARD = 3
    ACCUMULATE = 4
    """A gradient is complete: it becomes the parameter's, or is added to it and freed."""


class ConvolutionKind(IntEnum):
    """Classes of convolutions with different scratch memory."""

    POINTWISE = 0
    DENSE = 1
    GROUPED = 2
    DEPTHWISE = 3


class Pass(IntEnum):
    """Computation of a convolution."""

    FORWARD = 0
    DATA_GRADIENT = 1
    WEIGHT_GRADIENT = 2


class Origin(NamedTuple):
    """Origin of a tensor."""

    module: str
    """Path within the model, such as `layer1.0.conv2`; empty outside of modules."""
    operator: str
    """ATen operator, such as `convolution`."""
    line: str
    """File and line of the model's code, such as `timm/models/resnet.py:233`."""
    is_backward: bool
    """True if the backward pass made it; module and line are those of the forward operator."""


TRACED_BATCH_SIZES = (8, 32)
"""Batch sizes of traces; the sizes at others lie on the line through these two."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocations:
    """The allocations of a step at every batch size: E events in order."""

    kinds: npt.NDArray[np.int8]
    """`Event` of each (E)."""
    blocks: npt.NDArray[np.int32]
    """Number of the block, in the order of allocation; kind * 3 + pass of workspaces (E)."""
    sizes: IntArray
    """Bytes of the block, or that the convolution touches, at both `batch_sizes` (E, 2)."""
    gradients: npt.NDArray[np.int32]
    """Block of the gradient of each parameter that gets one, which outlives the step (P)."""
    parameter_bytes: IntArray
    """Bytes of each of these parameters (P)."""
    parameter_places: IntArray
    """Place of each of these among all parameters of the module (P)."""
    buffer_bytes: IntArray
    """Bytes of each buffer and other parameter."""
    element_bytes: IntArray
    """Bytes of an element of each of these parameters (P)."""
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES

    def sizes_at(self, batch_size: int) -> IntArray:
        """Return the bytes of each event at this batch size (E)."""
        first, second = self.batch_sizes
        share = (batch_size - first) / (second - first)
        below, above = self.sizes[:, 0], self.sizes[:, 1]
        return np.maximum(np.rint(below + (above - below) * share), 0).astype(np.int64)

    @property
    def additions(self) -> IntArray:
        """Index of the event at which each gradient is added to an existing one."""
        complete = self.kinds == Event.ACCUMULATE
        events = np.flatnonzero(complete & np.isin(self.blocks, self.gradients))[::-1]
        # What several parameters share is freed with the last.
        return events[np.unique(self.blocks[events], return_index=True)[1]]

    @property
    def end_of_forward(self) -> int:
        """Index of the event that ends the forward pass."""
        return int(np.flatnonzero(self.kinds == Event.END_OF_FORWARD)[0])


class KernelKind(IntEnum):
    """Classes of kernels that reach different shares of a device's peaks.

    The first four are `ConvolutionKind`.
    """

    POINTWISE = 0
    """Convolution of one pixel."""
    DENSE = 1
    GROUPED = 2
    DEPTHWISE = 3
    LINEAR = 4
    """Product with a weight matrix."""
    MATMUL = 5
    """Product of two computed tensors, many small ones at once."""
    ATTENTION = 6
    """Fused: products, softmax and dropout without a matrix of scores in memory."""
    BATCH_NORM = 7
    LAYER_NORM = 8
    """Also group, instance and RMS normalization."""
    SOFTMAX = 9
    ELEMENTWISE = 10
    """Reads and writes dense tensors of one layout, in order."""
    STRIDED = 11
    """Elementwise over tensors of different layouts."""
    CAST = 12
    COPY = 13
    """Copy into another layout or place: contiguous, cat, roll, pad."""
    REDUCTION = 14
    POOLING = 15
    INDEX = 16
    """Gather, scatter, embeddings, interpolation."""
    FILL = 17
    """Writes without reading."""
    BROADCAST = 18
    """Elementwise with a tensor that repeats along an axis."""
    OTHER = 19
    """Unknown: assumed to be limited by memory."""


class Size(IntEnum):
    """Sizes of a kernel."""

    READ_BYTES = 0
    WRITTEN_BYTES = 1
    FLOPS = 2
    """Two for each multiply-accumulate."""
    ROWS = 3
    """Rows of the result of a matrix product, or of a convolution as a product."""
    COLUMNS = 4
    """Columns of that; channels of a norm, axis of a softmax, results of a reduction."""
    DEPTH = 5
    """Length of each dot product, or number of values in each result of a reduction."""
    PRODUCTS = 6
    """Number of products at once: groups of a convolution, heads of an attention."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelTable:
    """The different kernels of one step, n of them, in the order in which they first run."""

    kinds: npt.NDArray[np.int8]
    """`KernelKind` of each (n)."""
    passes: npt.NDArray[np.int8]
    """`Pass` of each (n); DATA_GRADIENT for all of backward except weight gradients."""
    counts: npt.NDArray[np.int32]
    """Number of runs in the step (n)."""
    half: npt.NDArray[np.bool_]
    """True if it computes in 16 bits (n)."""
    channels_last: npt.NDArray[np.bool_]
    """True if it works on channels-last images (n)."""
    sizes: IntArray
    """Constant part and part per sample of each `Size` (n, 7, 2)."""
    windows: npt.NDArray[np.int32]
    """Height times width of a convolution's or pool's kernel (n); 1 for others."""
    strides: npt.NDArray[np.int32]
    """Stride of a convolution (n); 1 for others."""
    pixels: npt.NDArray[np.int32]
    """Height times width of a convolution's result (n); 1 for others."""

    def __len__(self) -> int:
        return len(self.kinds)

    def sizes_at(self, batch_size: int) -> npt.NDArray[np.float64]:
        """Return the sizes at this batch size, by `Size` (n, 7)."""
        fixed, slope = self.sizes[..., 0], self.sizes[..., 1]
        return fixed.astype(np.float64) + slope.astype(np.float64) * batch_size


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernels:
    """The kernels of one step at one batch size."""

    table: KernelTable
    sizes: npt.NDArray[np.float64]
    """Sizes of each kernel by `Size` (n, 7)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepKernels:
    """The kernels of one step of a model at one input size, and its trained parameters."""

    table: KernelTable
    parameter_tensors: int
    """Number of tensors that the optimizer updates; 0 in inference."""
    parameters: int
    """Number of their elements."""
    precision: Precision
    memory_format: MemoryFormat
    """Layout of images and weights; later tensors may have another."""
    fused_attention: bool = True
    """True if the software stack has a kernel for attention, as PyTorch from 2.0."""
    batch_size: int | None = None
    """The only batch size of a model that has one."""

    @property
    def needs_two_samples(self) -> bool:
        """True if a batch norm has one value per channel at batch 1, which PyTorch does not train.

        A batch norm in evaluation mode takes any batch.
        """
        return bool((self._trained_norms & (self.table.sizes_at(1)[:, Size.DEPTH] <= 1)).any())

    @property
    def has_batch_norm(self) -> bool:
        """True if a batch norm normalizes by the statistics of its batch."""
        if self.batch_size is not None:  # then the modes of batch norms are not distinguished
            return bool((self.table.kinds == KernelKind.BATCH_NORM).any())
        return bool(self._trained_norms.any())

    @property
    def _trained_norms(self) -> npt.NDArray[np.bool_]:
        """Return which kernels are batch norms in training mode (n); they read inputs twice."""
        table = self.table
        slopes = table.sizes[..., 1]
        written = slopes[:, Size.WRITTEN_BYTES]
        trains = (written > 0) & (slopes[:, Size.READ_BYTES] >= 2 * written)
        norms = (table.kinds == KernelKind.BATCH_NORM) & (table.passes == Pass.FORWARD)
        mask: npt.NDArray[np.bool_] = norms & trains
        return mask

    def at(self, batch_size: int) -> Kernels:
        """Return the kernels at this batch size.

        Raises:
            TrappmError: The batch size is below 1, or not the only one of the model.
        """
        if batch_size < 1 or self.batch_size not in (None, batch_size):
            only = "1 or more" if self.batch_size is None else f"{self.batch_size}"
            raise TrappmError(f"kernels at batch size {batch_size} of a model for {only}")
        return Kernels(table=self.table, sizes=self.table.sizes_at(batch_size))


TRACE_VERSION = 5
"""Increased when the tracer changes; steps of earlier versions are traced again."""
_QUANTIZED = re.compile(r"QuantizeLinear$|QLinear|ConvInteger$|MatMulInteger$|^com\.microsoft\.Q")


class TraceSettings(NamedTuple):
    """Settings of a step on which its trace depends."""

    precision: Precision = Precision.FP32
    """Types under autocast; with `bf16`, parameters and inputs have that type."""
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    """Layout of images and weights."""
    execution: Execution = Execution.EAGER
    """Kernels are those of this way to run the step; allocations are the eager ones."""
    fused_attention: bool = True
    """True if the software stack has a kernel for attention, as PyTorch from 2.0."""

    @classmethod
    def of(cls, settings: StepSettings, *, fused_attention: bool = True) -> Self:
        """Return the settings of a step without its optimizer."""
        precision, memory_format, _, execution = settings
        return cls(precision.types, memory_format, execution, fused_attention)


class TraceSource(enum.StrEnum):
    """Origin of a trace."""

    TRACED = "traced"
    """The model itself."""
    REBUILT = "rebuilt"
    """A module rebuilt from an ONNX file."""
    RUN = "run on the example"
    """The model itself, run on the values of its example, which its operators depend on."""


class SavedBytes(NamedTuple):
    """Bytes kept for the backward pass, affine in the batch size."""

    constant: int
    slope: int

    def at(self, batch_size: int) -> int:
        return self.constant + self.slope * batch_size


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One step of a model, at every batch size or at a single one.

    A part that cannot be traced is None: the graph, or allocations and kernels together.
    """

    phase: Phase
    graph: GraphTemplate | None
    """Graph of the forward pass, with dropout and the like as in inference."""
    allocations: Allocations | None
    kernels: StepKernels | None
    saved_bytes: SavedBytes | None = None
    """Bytes that autograd keeps between forward and backward pass; None in inference."""
    refusal: str | None = None
    """Why a part is None."""
    only_because: str = ""
    """Why it holds for a single batch size, or empty."""
    source: TraceSource = TraceSource.TRACED
    remark: str | None = None
    """Parts that the trace leaves out, or values that it assumes; None if there are none."""
    origins: Sequence[Origin] = ()
    """Origin of each block of the allocations, if they were asked for."""

    @property
    def batch_size(self) -> int | None:
        """The only batch size, or None."""
        kernels, graph = self.kernels, self.graph
        if kernels is not None:
            return kernels.batch_size
        return None if graph is None else graph.fixed_batch_size

    @property
    def quantized(self) -> str | None:
        """An operator on quantized numbers, which no training step has, or None."""
        operators = () if self.graph is None else self.graph.operators
        return next((name for name in operators if _QUANTIZED.search(name)), None)

    def to_bytes(self) -> bytes:
        """Return a compressed NumPy archive; equal traces give equal bytes."""
        arrays: dict[str, Any] = {}
        if self.graph is not None:
            arrays["graph"] = np.frombuffer(self.graph.to_bytes(), dtype=np.uint8)
        rest: dict[str, Any] = {
            "phase": self.phase,
            "saved_bytes": self.saved_bytes,
            "refusal": self.refusal,
            "only_because": self.only_because,
            "source": self.source,
            "remark": self.remark,
            "origins": self.origins,
        }
        if self.allocations is not None:
            for name in _ALLOCATIONS:
                arrays[f"allocations.{name}"] = np.asarray(getattr(self.allocations, name))
        if self.kernels is not None:
            for name in _KERNELS:
                arrays[f"kernels.{name}"] = getattr(self.kernels.table, name)
            rest["kernels"] = {name: getattr(self.kernels, name) for name in _OF_KERNELS}
        return pack(arrays | {"rest": np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the trace of `to_bytes`.

        Raises:
            TrappmError: The bytes are damaged.
        """
        with report_damage("trace"):
            arrays = unpack(data)
            rest = json.loads(arrays["rest"].tobytes())
            allocations = kernels = None
            if "allocations.kinds" in arrays:
                columns = {
                    name: arrays[key]
                    for name in _ALLOCATIONS
                    if (key := f"allocations.{name}") in arrays
                }
                first, second = columns.pop("batch_sizes").tolist()
                rest.pop("element_bytes", None)  # of some hours
                if "element_bytes" not in columns:  # written before 30 November 2026
                    sizes, count = columns["parameter_bytes"], rest["kernels"]["parameters"]
                    usual = round(float(sizes.sum()) / max(count, 1)) or 1
                    columns["element_bytes"] = np.full_like(sizes, usual)
                allocations = Allocations(batch_sizes=(first, second), **columns)
            if (row := rest.pop("kernels", None)) is not None:
                row["precision"] = Precision(row["precision"])
                row["memory_format"] = MemoryFormat(row["memory_format"])
                table = KernelTable(**{name: arrays[f"kernels.{name}"] for name in _KERNELS})
                kernels = StepKernels(table=table, **row)
            saved = rest.pop("saved_bytes")
            graph = (
                GraphTemplate.from_bytes(arrays["graph"].tobytes()) if "graph" in arrays else None
            )
            return cls(
                graph=graph,
                allocations=allocations,
                kernels=kernels,
                phase=Phase(rest.pop("phase")),
                source=TraceSource(rest.pop("source")),
                saved_bytes=None if saved is None else SavedBytes(*saved),
                origins=[Origin(*origin) for origin in rest.pop("origins")],
                **rest,
            )


_ALLOCATIONS = tuple(field.name for field in fields(Allocations))
_KERNELS = tuple(field.name for field in fields(KernelTable))
_OF_KERNELS = tuple(field.name for field in fields(StepKernels) if field.name != "table")


MAX_BYTES = 2 << 30
"""Default size of a cache; beyond it the oldest entries go."""
MAX_ENTRY_BYTES = 64 << 20
CONTENT = "sha256 "
"""Beginning of a model's key that is the hash of a file."""
_REFUSED = b"refused\n"


class TraceKey(NamedTuple):
    """A model and the way its step is run; the versions of the libraries come on top."""

    model: str
    """Name of an architecture, or the content of a file."""
    input_size: int | None
    """Pixels or tokens; None for the file's own."""
    settings: TraceSettings = TraceSettings()
    phase: Phase = Phase.TRAIN

    @classmethod
    def of(cls, configuration: Configuration, *, fused_attention: bool = True) -> Self:
        """Return the key of a configuration's step."""
        c = configuration
        settings = TraceSettings(c.precision.types, c.memory_format, c.execution, fused_attention)
        return cls(c.architecture, c.input_size, settings, c.phase)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits of the key, of the libraries and of the tracer's version.

        Raises:
            InputError: There is no such model.
        """
        model = self.model if self.model.startswith(CONTENT) else content_of(self.model)
        libraries = library_versions(), uses_fused_attention()
        parts = TRACE_VERSION, *libraries, model, self.input_size, *self.settings
        text = repr((*map(str, parts), str(self.phase)))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Refusal(NamedTuple):
    """Why a step cannot be traced, if the model is the reason."""

    reason: str


def entry_to_bytes(made: Trace | Refusal) -> bytes:
    """Return an entry as bytes."""
    return _REFUSED + made.reason.encode() if isinstance(made, Refusal) else made.to_bytes()


def entry_from_bytes(data: bytes) -> Trace | Refusal:
    """Return the entry of `entry_to_bytes`; raises TrappmError if it is damaged."""
    if data.startswith(_REFUSED):
        return Refusal(data.removeprefix(_REFUSED).decode(errors="replace"))
    return Trace.from_bytes(data)


class TraceCache(ABC):
    """Traced steps and refusals by their keys; a contract of both homes."""

    @abstractmethod
    def get(self, key: TraceKey) -> Trace | Refusal | None:
        """Return what is known of a step, or None; a damaged entry is removed."""

    @abstractmethod
    def put(self, key: TraceKey, made: Trace | Refusal) -> None:
        """Keep a step; other processes may do so at the same time."""

    @abstractmethod
    def missing(self, keys: Collection[TraceKey]) -> list[TraceKey]:
        """Return the keys without an entry, in their order."""


@dataclass(frozen=True)
class TraceFolder(TraceCache):
    """Traced steps in a folder; one that cannot be written keeps nothing."""

    folder: Path
    max_bytes: int = MAX_BYTES

    def get(self, key: TraceKey) -> Trace | Refusal | None:
        path = self._path(key)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_ENTRY_BYTES + 1)
            return entry_from_bytes(data)
        except OSError:
            return None
        except TrappmError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None

    def put(self, key: TraceKey, made: Trace | Refusal) -> None:
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with write_atomically(self._path(key), replace=True) as part:
                part.write_bytes(entry_to_bytes(made))
            self._shrink()

    def missing(self, keys: Collection[TraceKey]) -> list[TraceKey]:
        there = {path.stem for path in self.folder.glob("*.trace")}
        return [key for key in keys if key.digest not in there]

    def _path(self, key: TraceKey) -> Path:
        return self.folder / f"{key.digest}.trace"

    def _shrink(self) -> None:
        """Remove the oldest entries beyond the largest size."""
        entries = [(path.stat(), path) for path in self.folder.glob("*.trace")]
        entries.sort(key=lambda entry: entry[0].st_mtime_ns, reverse=True)
        kept_bytes = 0
        for status, path in entries:
            kept_bytes += status.st_size
            if kept_bytes > self.max_bytes:
                path.unlink(missing_ok=True)
