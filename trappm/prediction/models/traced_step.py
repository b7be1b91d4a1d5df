"""A traced step with the origins of its tensors, at all batch sizes or at a single one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from trappm.profiler.errors import BatchOrderError, TrappmError
from trappm.profiler.files.array_archive import pack, unpack
from trappm.profiler.models.model_input import Inputs
from trappm.profiler.records import Phase
from trappm.profiler.simulation.step_trace import (
    MAX_EVENTS,
    TRACED_BATCH_SIZES,
    Origin,
    StepTrace,
)

if TYPE_CHECKING:
    from torch import nn

    from trappm.profiler.tracing.tracer import StepOptions


class TracedStep(NamedTuple):
    """Allocations of a step, and who makes them."""

    trace: StepTrace
    origins: Sequence[Origin]
    """Of each block of the trace."""
    only_batch: int | None
    """The only batch size that it holds for, if there is only one."""
    reason: str
    """Why there is only one."""

    def to_bytes(self) -> bytes:
        """Return the step as a compressed archive."""
        arrays = {name: np.asarray(getattr(self.trace, name)) for name in _ARRAYS}
        rest = json.dumps([self.origins, self.only_batch, self.reason]).encode()
        return pack({**arrays, "rest": np.frombuffer(rest, dtype=np.uint8)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the step that `to_bytes` wrote."""
        arrays = unpack(data, {**_ARRAYS, "rest": np.uint8}, 64 * MAX_EVENTS)
        origins, only_batch, reason = json.loads(arrays.pop("rest").tobytes())
        sizes = arrays.pop("batch_sizes").tolist()
        trace = StepTrace(batch_sizes=tuple(sizes), **arrays)
        return cls(trace, [Origin(*origin) for origin in origins], only_batch, reason)


_ARRAYS = {
    "kinds": np.int8, "blocks": np.int32, "sizes": np.int64, "gradients": np.int32,
    "parameter_bytes": np.int64, "buffer_bytes": np.int64, "batch_sizes": np.int64,
}  # fmt: skip


def traced_step(
    module: nn.Module,
    inputs: Inputs,
    options: StepOptions,
    phase: Phase,
    batch_size: int,
    only_because: str = "",
) -> TracedStep:
    """Trace a step for all batch sizes, or for a single one where it is no line over them.

    Args:
        module: On the meta device.
        inputs: What it is called with.
        options: How the step is run.
        phase: Training or inference.
        batch_size: The single one.
        only_because: Why no other one can be traced, if that is known.

    Raises:
        TrappmError: It cannot be traced at that batch size either.
    """
    from trappm.profiler.tracing.tracer import Tracer

    reason = only_because
    try:
        if not only_because:
            tracer = Tracer(module, inputs, options, with_origins=True)
            trace, _ = tracer.phase(phase)
            if tracer.is_affine(phase):
                return TracedStep(trace, tracer.origins[phase], None, "")
            reason = "some tensors grow faster than the batch, as where all samples are compared"
    except BatchOrderError:
        reason = "other operators run at every batch size, as where it loops over its samples"
    except TrappmError as error:
        reason = (
            f"at batch {TRACED_BATCH_SIZES[0]} {str(error).rstrip('.')}; if the loss has labels of "
            "a fixed batch, give them as targets=labels"
        )
    tracer = Tracer(module, inputs, options, (batch_size, batch_size), with_origins=True)
    trace, _ = tracer.phase(phase)
    return TracedStep(trace, tracer.origins[phase], batch_size, reason)
