"""Specifications of devices, from which the constants of priors start.

Labels correct everything that depends on them. `profiler.devices.catalogue` lists the GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trappm.profiler.devices.base import rank_key
from trappm.profiler.devices.catalogue import CONTEXT_MIB, card_of, process_memory_mib
from trappm.profiler.errors import InputError
from trappm.profiler.records import Phase
from trappm.profiler.records.kernels import KernelKind, Size

if TYPE_CHECKING:
    import numpy.typing as npt

    from trappm.learner.workload import BoolArray
    from trappm.profiler.records.kernels import Kernels


WIDE_TFLOPS = 0.3
"""Peak in fp32 of one multiprocessor: 64 lanes have 0.16 to 0.2, 128 have 0.35 to 0.65."""


@dataclass(frozen=True)
class DeviceSpec:
    """Speed of a device according to its data sheet, and memory of its processes."""

    half_tflops: float
    """Peak of dense products in 16 bits."""
    full_tflops: float
    """Peak of products in fp32 without TF32, PyTorch's default for matrix products."""
    bandwidth_gbs: float
    cache_mib: float
    """Size of the last-level cache."""
    units: int
    """Number of streaming multiprocessors, or of CPU threads."""
    launch_us: float = 2.0
    """Shortest time of a kernel on the device."""
    dispatch_us: float = 8.0
    """Host time per operator."""
    process_mib: float = CONTEXT_MIB[Phase.TRAIN]
    """Memory of a training process without its tensors: context, libraries, workspaces."""
    fragments: float = 1.0
    """Share of the gaps between blocks of CUDA's allocator that also occurs here."""
    tf32_tflops: float | None = None
    """Peak of fp32 convolutions, for which PyTorch allows TF32 in cuDNN; None without TF32."""

    @property
    def lanes_tflops(self) -> float:
        """Peak in fp32 next to the arithmetic of indices.

        In multiprocessors of 128 lanes, half of them do either whole numbers or fp32 (NVIDIA's
        whitepapers of GA102 and AD102).
        """
        is_wide = self.full_tflops / self.units > WIDE_TFLOPS
        return self.full_tflops / (2 if is_wide else 1)

    def products_at_peak_ms(self, kernels: Kernels) -> float:
        """Return the time that the products of a step would take at the device's peak, in ms.

        Divided by the step time, this is the model FLOPs utilization (MFU; Chowdhery et al., PaLM,
        2022, appendix B), with the peak of each product's own data type.
        """
        table = kernels.table
        tf32 = self.uses_tf32(table.kinds, table.half)
        tflops = np.select(
            [table.half, tf32], [self.half_tflops, self.tf32_tflops or 0.0], self.full_tflops
        )
        flops = table.counts * kernels.sizes[:, Size.FLOPS] * (table.kinds <= KernelKind.ATTENTION)
        return float((flops / tflops).sum() / 1e9)

    def uses_tf32(self, kinds: npt.NDArray[np.integer], half: BoolArray) -> BoolArray:
        """Return which of n kernels compute in TF32: fp32 convolutions that are not depthwise."""
        return ~half & (kinds <= KernelKind.GROUPED) & (self.tf32_tflops is not None)


# Memory above the baseline of a warm CPU process consists mostly of tensors.
CPU = DeviceSpec(
    0.06, 0.06, 20, 32, 2, launch_us=5.0, dispatch_us=5.0, process_mib=5.0, fragments=0.1
)


def spec_of(device: str) -> DeviceSpec:
    """Return the specification of a device key such as `a100` or `cpu-2t`.

    Raises:
        InputError: The catalogue does not list the device.
    """
    spec = known_spec(device)
    if spec is None:
        raise InputError(
            f"nothing is known of device {device!r}, so its step times cannot be simulated; add "
            "a line of its data sheet to profiler/devices/catalogue.csv"
        )
    return spec


def known_spec(device: str) -> DeviceSpec | None:
    """Return the specification of a device, or None if the catalogue does not list it."""
    if device.startswith("cpu"):
        return CPU
    card = card_of(rank_key(device).member)
    if card is None:
        return None
    return DeviceSpec(
        half_tflops=card.half_tflops,
        full_tflops=card.fp32_tflops,
        bandwidth_gbs=card.bandwidth_gbs,
        cache_mib=card.cache_mib,
        units=card.units,
        tf32_tflops=card.tf32_tflops,
        process_mib=process_memory_mib(device, Phase.TRAIN),
    )
