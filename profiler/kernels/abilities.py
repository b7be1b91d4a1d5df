"""What a prepared device can compute in, and the sizes of its caches."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from trappm.profiler.devices import StepDevice
from trappm.profiler.kernels.catalogue import Abilities
from trappm.profiler.kernels.kernel_call import DataType
from trappm.profiler.records import Configuration, Precision

_PRECISIONS = {
    DataType.FP32: Precision.FP32,
    DataType.FP16: Precision.AMP_FP16,
    DataType.BF16: Precision.AMP_BF16,
}
_CPU_CHECKS = {
    DataType.FP16: ("_is_avx512_fp16_supported", "_is_amx_fp16_supported"),
    DataType.BF16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
}
"""Of torch.cpu: whether the processor computes in the type by itself. Both types run everywhere,
but converted to 32 bits and back, which no library takes for fast."""
_AMPERE = 8
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SIZE = re.compile(r"(\d+)([KM])")


def abilities_of(device: StepDevice) -> Abilities:
    """What kernels to time on a prepared device."""
    where = device.torch_device
    is_cpu = where.type == "cpu"
    return Abilities(
        memory_mib=device.capacity_mib,
        data_types=tuple(t for t in DataType if _computes(device, t)),
        has_tf32=where.type == "cuda" and torch.cuda.get_device_capability(where)[0] >= _AMPERE,
        is_cpu=is_cpu,
    )


def cache_bytes(where: torch.device, caches: Path = _CACHES) -> dict[str, int]:
    """The device's caches of data by name, `L1` to `L3`, as far as they are told."""
    if where.type == "cuda":
        size = getattr(torch.cuda.get_device_properties(where), "L2_cache_size", 0)
        return {"L2": int(size)} if size else {}
    if where.type != "cpu":
        return {}
    sizes = {}
    for index in sorted(caches.glob("index[0-9]")):
        try:
            level, kind, size = (
                (index / name).read_text(encoding="ascii").strip()
                for name in ("level", "type", "size")
            )
        except OSError:
            continue
        match = _SIZE.fullmatch(size)
        if kind != "Instruction" and match is not None:
            sizes[f"L{level}"] = int(match[1]) << (10 if match[2] == "K" else 20)
    return sizes


def _computes(device: StepDevice, data_type: DataType) -> bool:
    if data_type is DataType.FP32:
        return True
    if device.torch_device.type == "cpu" and not _is_native(data_type):
        return False
    configuration = Configuration(
        architecture="any", batch_size=1, input_size=1, precision=_PRECISIONS[data_type]
    )
    return device.refusal(configuration) is None


def _is_native(data_type: DataType) -> bool:
    checks = (getattr(torch.cpu, name, None) for name in _CPU_CHECKS[data_type])
    return any(check() for check in checks if check is not None)
