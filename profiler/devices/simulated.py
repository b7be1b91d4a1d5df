"""GPUs from the catalogue of specifications: `simulated:a100`, `simulated:h200`.

Each node of the static graph takes the time of its arithmetic or its memory traffic at the peak,
whichever is longer (Williams, Waterman and Patterson, "Roofline", CACM 2009), and one launch.
Kernels do not reach peaks, so the times are lower bounds, for trying campaigns without a GPU. The
provenance is `simulated`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trappm.profiler.devices.base import Device
from trappm.profiler.devices.catalogue import CONTEXT_MIB, Card, card_of
from trappm.profiler.errors import DeviceError, UnsupportedModelError
from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT, CONVOLUTIONS, PRODUCTS, VIEWS
from trappm.profiler.host.environment import SEED, host_facts
from trappm.profiler.memory.simulation import TrainingLoop, memory_of
from trappm.profiler.records import (
    Configuration,
    Execution,
    Graph,
    Outcome,
    Phase,
    Precision,
    Protocol,
    Provenance,
)
from trappm.profiler.steps.meter import Findings
from trappm.profiler.steps.sampling import sample, summarize

if TYPE_CHECKING:
    from trappm.profiler.traced_step import Trace

FloatArray = npt.NDArray[np.float64]

# Constants that data sheets omit; assumed the same for all devices.
_LAUNCH_MS = 0.005
_IDLE_SHARE = 0.12
"""Power of an idle GPU, as a share of its TDP."""
_NOISE = 0.01
"""Standard deviation of the logarithm of a sample."""

_BACKWARD_PASSES = 2
"""Work of the backward pass relative to the forward pass: gradients of inputs and weights."""


class SimulatedDevice(Device):
    """A GPU by its specification; traces the step, and needs no lock.

    Args:
        key: Such as `simulated:a100`.
        seed: Seed of the noise of the samples.
    """

    lock_name = None
    provenance = Provenance.SIMULATED

    def __init__(self, key: str) -> None:
        super().__init__(key)
        name = key.partition(":")[2]
        card = card_of(name)
        if card is None:
            raise DeviceError(
                f"no card of profiler/devices/catalogue.csv is named {name!r}; name one as in "
                "simulated:a100, or add it there"
            )
        self._card: Card = card

    def environment(self) -> dict[str, Any]:
        return {
            **host_facts(),
            "device": self.key,
            "device_name": f"{self._card.name} (simulated)",
            "device_memory_mib": self.capacity_mib,
            "device_power_limit_w": self._card.power_w,
            "noise_seed": SEED,
            "tf32": "convolutions only" if self._card.tf32_tflops else None,
        }

    @property
    def capacity_mib(self) -> float:
        return self._card.memory_gb * 1024.0

    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> Findings:
        enter("create")
        if configuration.precision.needs_bf16 and not self._card.has_bf16:
            raise UnsupportedModelError(f"{self._card.name} has no bf16 arithmetic")
        if configuration.execution is Execution.COMPILE:
            raise UnsupportedModelError("compiled steps are not simulated")
        traced = _trace(configuration.architecture, configuration.input_size, configuration.phase)
        if traced.graph is None:
            raise UnsupportedModelError(traced.refusal or "its forward pass has no graph")
        graph = traced.graph.at(configuration.batch_size)
        enter("warmup")
        memory_mib, detail_mib, missing = self._memory(traced, graph, configuration)
        if memory_mib is not None and memory_mib > self.capacity_mib:
            return Findings(
                outcome=Outcome.OOM,
                failed_in="warmup",
                message=f"the step needs {memory_mib:.0f} MiB of {self.capacity_mib:.0f}",
                memory_detail_mib=detail_mib,
                provenance=self.provenance,
            )
        enter("measure")
        parts_ms, busy_ms = self._step(graph, configuration)
        step_ms = sum(parts_ms)
        digest = hashlib.sha256(f"{SEED} {self.key} {configuration.id}".encode()).digest()
        noise = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        samples_ms = sample(
            lambda count: (step_ms * np.exp(noise.normal(0.0, _NOISE, count))).tolist(), protocol
        )
        train = configuration.phase is Phase.TRAIN
        step = summarize(samples_ms, [parts_ms] if train else ())
        power_w = None
        if self._card.power_w is None:
            missing = missing | {"power_w": f"no power limit of {self._card.name} is known"}
        else:
            busy = _IDLE_SHARE + (1 - _IDLE_SHARE) * busy_ms / step_ms
            power_w = self._card.power_w * busy
        return Findings(
            outcome=Outcome.OK,
            step_samples_ms=samples_ms,
            step=step,
            memory_mib=memory_mib,
            memory_detail_mib=detail_mib,
            power_w=power_w,
            energy_j=None if power_w is None else power_w * step.median_ms / 1000,
            missing=missing,
            environment={"power_method": "idle to TDP by share of time at a peak (simulated)"},
            provenance=self.provenance,
        )

    def _step(
        self, graph: Graph, configuration: Configuration
    ) -> tuple[tuple[float, float, float], float]:
        """Return the milliseconds of forward, backward and optimizer, and those at a peak."""
        kernels = np.array([o not in VIEWS for o in graph.operators], dtype=bool)
        width = BYTES_PER_ELEMENT // (1 if configuration.precision.is_fp32 else 2)
        traffic = _elements_moved(graph) * width / (self._card.bandwidth_gbs * 1e6)
        arithmetic = 2.0 * graph.macs / (self._peak_tflops(graph, configuration) * 1e9)
        busy_ms = float(np.maximum(traffic, arithmetic)[kernels].sum())
        forward_ms = busy_ms + _LAUNCH_MS * int(kernels.sum())
        if configuration.phase is Phase.INFER:
            return (forward_ms, 0.0, 0.0), busy_ms
        each = configuration.optimizer.bytes_per_update(BYTES_PER_ELEMENT)
        update = each * int(graph.parameters.sum())
        update_ms = update / (self._card.bandwidth_gbs * 1e6)
        parts_ms = (forward_ms, _BACKWARD_PASSES * forward_ms, update_ms + _LAUNCH_MS)
        return parts_ms, busy_ms * (1 + _BACKWARD_PASSES) + update_ms

    def _peak_tflops(self, graph: Graph, configuration: Configuration) -> FloatArray:
        """Return the peak of each node's arithmetic (N)."""
        card = self._card
        precision, tf32_tflops = configuration.precision, card.tf32_tflops or card.fp32_tflops
        convolution = product = card.fp32_tflops if precision.is_fp32 else card.half_tflops
        if precision in (Precision.FP32, Precision.TF32):
            convolution = tf32_tflops
        if precision is Precision.TF32:
            product = tf32_tflops
        peaks = dict.fromkeys(CONVOLUTIONS, convolution) | dict.fromkeys(PRODUCTS, product)
        return np.array([peaks.get(o, card.fp32_tflops) for o in graph.operators])

    def _memory(
        self, traced: Trace, graph: Graph, configuration: Configuration
    ) -> tuple[float | None, dict[str, float], dict[str, str]]:
        """Return the memory of the process in MiB, its parts, and why it is missing."""
        detail = {"capacity": self.capacity_mib}
        weights = BYTES_PER_ELEMENT * float(graph.parameters.sum()) / 2**20
        if configuration.phase is Phase.INFER:
            # The largest node holds its input while it writes its output.
            live = weights + BYTES_PER_ELEMENT * float(_elements_moved(graph).max()) / 2**20
            live += self._card.library_workspace_mib(Phase.INFER)
            return live + CONTEXT_MIB[Phase.INFER], detail | {"peak_allocated": live}, {}
        if traced.allocations is None:
            return None, detail, {"memory_mib": f"no trace of the step: {traced.refusal}"}
        simulated = memory_of(traced, configuration.batch_size, configuration.optimizer)
        live, reserved = simulated.live_mib, simulated.reserved_with_workspace_mib
        if not configuration.precision.is_fp32:
            # Weights, gradients and states stay in fp32; activations take half.
            sizes = (BYTES_PER_ELEMENT * graph.parameters).tolist()
            loop = TrainingLoop(optimizer=configuration.optimizer)
            widths = [BYTES_PER_ELEMENT] * len(sizes)
            kept = 2 * weights + loop.state_bytes(sizes, range(len(sizes)), widths) / 2**20
            live, reserved = (kept + max(0.0, size - kept) / 2 for size in (live, reserved))
        workspace = self._card.library_workspace_mib(Phase.TRAIN)
        live, reserved = live + workspace, reserved + workspace
        detail |= {"peak_allocated": live, "peak_reserved": reserved}
        return reserved + CONTEXT_MIB[Phase.TRAIN], detail, {}


@lru_cache(maxsize=8)
def _trace(architecture: str, input_size: int, phase: Phase) -> Trace:
    """Return the step in fp32, from which the other precisions are estimated."""
    from trappm.profiler.trace import trace

    return trace(architecture, input_size, phase=phase)


def _elements_moved(graph: Graph) -> FloatArray:
    """Return the number of elements that each node reads and writes (N)."""
    written = graph.memory_bytes / BYTES_PER_ELEMENT
    outputs = written - graph.parameters
    read = np.zeros(graph.node_count)
    np.add.at(read, graph.edges[:, 1], outputs[graph.edges[:, 0]])
    fed = np.zeros(graph.node_count, dtype=bool)
    fed[graph.edges[:, 1]] = True
    images = np.where(graph.input_shapes == 0, 1, graph.input_shapes).prod(axis=1)
    moved: FloatArray = written + np.where(fed, read, images)
    return moved
