"""One step of a model as it was traced: its graph, allocations and kernels. Needs NumPy only."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np

from trappm.profiler.files import pack, reading_profile, unpack
from trappm.profiler.records import (
    Execution,
    GraphTemplate,
    MemoryFormat,
    Phase,
    Precision,
    StepSettings,
)
from trappm.profiler.records.allocations import Allocations, Origin
from trappm.profiler.records.kernels import KernelTable, StepKernels

TRACE_VERSION = 4
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
        return cls(precision, memory_format, execution, fused_attention)


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
        with reading_profile("trace"):
            arrays = unpack(data)
            rest = json.loads(arrays["rest"].tobytes())
            allocations = kernels = None
            if "allocations.kinds" in arrays:
                columns = {name: arrays[f"allocations.{name}"] for name in _ALLOCATIONS}
                first, second = columns.pop("batch_sizes").tolist()
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
