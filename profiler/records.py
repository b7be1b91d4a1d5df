"""The plain records that every room speaks in: Configuration, Graph, Protocol, Measurement.

They are frozen, hold only numbers, strings and NumPy arrays, and import without torch, so that
asking the label store or drawing a pool is quick. Whatever needs torch, timm or ONNX to *make* one
of them lives in the other modules of this room.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import io
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from profiler.errors import InputError, TrappmError
from profiler.graph_hash import graph_hash

IntArray = npt.NDArray[np.int64]

SHAPE_LENGTH = 6
"""Tensor shapes are padded with zeros to this length, as in the paper's node features."""


class Phase(enum.StrEnum):
    """What a step does: a whole training step, or one forward pass without gradients."""

    TRAIN = "train"
    INFER = "infer"


class Precision(enum.StrEnum):
    """Arithmetic of the step: plain fp32, or autocast to fp16 or bf16."""

    FP32 = "fp32"
    AMP_FP16 = "amp-fp16"
    AMP_BF16 = "amp-bf16"


class MemoryFormat(enum.StrEnum):
    """Layout of the images and convolution weights."""

    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels-last"


class Optimizer(enum.StrEnum):
    """Optimizer of a training step; its states cost memory, its update costs time."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"


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


@dataclass(frozen=True, kw_only=True, order=True)
class Configuration:
    """An architecture with everything that changes the cost of its step.

    Raises:
        InputError: a batch or input size below 1, or an empty architecture name.
    """

    architecture: str
    """A timm model name, such as `resnet18`."""
    batch_size: int
    input_size: int
    """Height and width of the square input image, in pixels."""
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
        for name, kind in (
            ("precision", Precision),
            ("memory_format", MemoryFormat),
            ("optimizer", Optimizer),
            ("phase", Phase),
        ):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except ValueError as error:
                allowed = ", ".join(kind)
                raise InputError(f"{name} is {value!r}; it must be one of {allowed}") from error

    @property
    def id(self) -> str:
        """20 hexadecimal digits: a hash of exactly the fields above."""
        return hashlib.sha256(_canonical_json(self.to_dict()).encode()).hexdigest()[:20]

    def to_dict(self) -> dict[str, Any]:
        return {
            name: value.value if isinstance(value, enum.Enum) else value
            for name, value in dataclasses.asdict(self).items()
        }

    def __str__(self) -> str:
        parts = [f"{self.architecture} batch {self.batch_size} at {self.input_size} px"]
        parts += [
            str(getattr(self, f.name)) for f in dataclasses.fields(self)
            if f.default is not dataclasses.MISSING and getattr(self, f.name) != f.default
        ]  # fmt: skip
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The computation graph of a configuration: N nodes, E edges, with sizes at its batch size."""

    operators: tuple[str, ...]
    """ONNX operator type of each node, in topological order (N)."""
    edges: IntArray
    """Producer and consumer of every edge (E, 2)."""
    input_shapes: IntArray
    """Shape of each node's first input, padded with zeros (N, 6)."""
    output_shapes: IntArray
    """Shape of each node's first output, padded with zeros (N, 6)."""
    macs: IntArray
    """Multiply-accumulate operations of each node's forward pass (N)."""
    parameters: IntArray
    """Number of weights of each node (N); a weight that two nodes share counts at the first."""
    memory_bytes: IntArray
    """Bytes of each node's outputs and weights in fp32 (N)."""
    batch_size: int

    @property
    def node_count(self) -> int:
        return len(self.operators)

    @property
    def edge_count(self) -> int:
        return int(self.edges.shape[0])


_SCALED = ("input_shapes", "output_shapes", "macs", "memory_bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphTemplate:
    """The graph of an architecture at one input size, for every batch size.

    Every size in it is affine in the batch size (`constant + slope * batch_size`), which whoever
    builds one has checked at a third batch size. A model whose batch size is baked in has
    `fixed_batch_size` and slopes of zero.
    """

    operators: tuple[str, ...]
    edges: IntArray
    constant: Mapping[str, IntArray]
    """The part that does not grow, for input_shapes, output_shapes, macs and memory_bytes."""
    slope: Mapping[str, IntArray]
    """What each further sample adds, for the same four."""
    parameters: IntArray
    fixed_batch_size: int | None = None

    def at(self, batch_size: int) -> Graph:
        """The graph at this batch size.

        Raises:
            InputError: the batch size is below 1, or the model only has another, fixed one.
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
            **sizes,
        )

    @classmethod
    def from_graphs(cls, first: Graph, second: Graph, check: Graph) -> Self:
        """The template through two graphs of one model, verified on a third.

        Raises:
            TrappmError: the three are not of one structure, or not affine in the batch size.
        """
        same = all(g.operators == first.operators for g in (second, check))
        if not same or not all(np.array_equal(g.edges, first.edges) for g in (second, check)):
            raise TrappmError("the graph's structure changes with the batch size")
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
        template = cls(
            operators=first.operators,
            edges=first.edges,
            constant=constant,
            slope=slope,
            parameters=first.parameters,
        )
        again = template.at(check.batch_size)
        for name in _SCALED:
            if not np.array_equal(getattr(again, name), getattr(check, name)):
                raise TrappmError(
                    f"{name} is not affine in the batch size; it mixes the samples of a batch"
                )
        return template

    @classmethod
    def fixed(cls, graph: Graph) -> Self:
        """A template that knows one batch size only."""
        return cls(
            operators=graph.operators,
            edges=graph.edges,
            constant={name: getattr(graph, name) for name in _SCALED},
            slope={name: np.zeros_like(getattr(graph, name)) for name in _SCALED},
            parameters=graph.parameters,
            fixed_batch_size=graph.batch_size,
        )

    def to_bytes(self) -> bytes:
        """A compressed NumPy archive without pickled objects."""
        vocabulary = sorted(set(self.operators))
        arrays: dict[str, npt.NDArray[Any]] = {
            "vocabulary": np.array(vocabulary, dtype=np.str_),
            "operators": np.array([vocabulary.index(o) for o in self.operators], dtype=np.int32),
            "edges": self.edges,
            "parameters": self.parameters,
            "fixed_batch_size": np.array(self.fixed_batch_size or 0),
        }
        arrays |= {f"constant.{name}": self.constant[name] for name in _SCALED}
        arrays |= {f"slope.{name}": self.slope[name] for name in _SCALED}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # NumPy stub: allow_pickle
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            vocabulary = [str(name) for name in arrays["vocabulary"]]
            return cls(
                operators=tuple(vocabulary[i] for i in arrays["operators"]),
                edges=arrays["edges"],
                constant={name: arrays[f"constant.{name}"] for name in _SCALED},
                slope={name: arrays[f"slope.{name}"] for name in _SCALED},
                parameters=arrays["parameters"],
                fixed_batch_size=int(arrays["fixed_batch_size"]) or None,
            )

    @property
    def content_hash(self) -> str:
        """64 hexadecimal digits, equal for graphs of one structure in whatever order of nodes."""
        columns = [part[name] for part in (self.constant, self.slope) for name in _SCALED]
        return graph_hash(
            self.operators,
            self.edges,
            np.column_stack([*columns, self.parameters]).astype(np.int64),
            salt=f"fixed batch size {self.fixed_batch_size}",
        )


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a measurement is taken: how many steps, how long, and when to give up.

    After `warmup_steps`, steps are timed until at least `min_steps` have been taken and either the
    relative standard error of the median is below `target_relative_error` or has stopped falling,
    or `max_steps` or `max_seconds` is reached. The paper's protocol is 5 and 50, whatever the
    noise.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    name: str = "paper"
    warmup_steps: int = 5
    min_steps: int = 50
    max_steps: int = 50
    max_seconds: float = 60.0
    target_relative_error: float = 0.0
    timeout_s: float = 300.0
    """Wall time after which the measuring process is killed, model creation included."""
    unstable_relative_iqr: float = 0.25
    """A run whose interquartile range exceeds this share of its median is `unstable`."""
    unstable_lost_share: float = 0.1
    """So is a run that waited for more than this share of its CPU time while others had it."""

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

    @property
    def step_time_ms(self) -> float | None:
        return None if self.step is None else self.step.median_ms

    @property
    def samples_per_second(self) -> float | None:
        """Images that the device gets through."""
        if self.step is None:
            return None
        return 1000 * self.configuration.batch_size / self.step.median_ms

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


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def is_cpu_device(key: str) -> bool:
    """Whether this device key means cores of a host, such as `cpu-2t`, and not a GPU."""
    return key.startswith("cpu-")
