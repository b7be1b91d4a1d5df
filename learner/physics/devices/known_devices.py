"""Constants of GPUs without labels, learned from published steps and kernels.

`known_devices.safetensors` is written by `python -m research fit-priors step-time`, from the
sources of `LEARNED_FROM`. The V100's heads of the shipped snapshot start from it, and those of
campaigns whose device was characterised; others start from the specification (`starting_prior`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.physics.devices.joint_fit import Distribution, Evidence
from trappm.learner.workload import Array, Workload
from trappm.profiler.kernels.kernel_call import DataType, KernelCall, KernelMeasurement, Operator
from trappm.profiler.kernels.running import kernel_profile_of
from trappm.profiler.records import Graph, Optimizer, Outcome, Phase
from trappm.profiler.records.step_scope import StepScope

FILE = Path(__file__).parent / "known_devices.safetensors"
LEARNED_FROM = (
    (
        "nodes/pgb_torchvision_step.csv",
        "pytorch-gpu-benchmark, other cards",
        "MIT",
        181,
    ),
    ("rtx3090_train_step_amp_nchw.csv", "timm, RTX 3090", "Apache-2.0", 248),
    ("nodes/neusight_kernels_fp32_other_gpus.csv.gz", "neusight, P100", "MIT", 97),
)
"""File, source, licence and number of labels of what the distribution was learned from."""


@cache
def known_devices() -> Distribution:
    """Return the distribution of constants that comes with the package."""
    tensors = load_file(FILE)
    return Distribution(**{field.name: tensors[field.name] for field in fields(Distribution)})


def write(distribution: Distribution, path: Path = FILE) -> None:
    tensors = {f.name: getattr(distribution, f.name).contiguous() for f in fields(Distribution)}
    save_file(tensors, path)


@lru_cache(maxsize=4096)
def kernel_workload(call: KernelCall) -> Workload:
    """Return a kernel alone as a step of one kernel, which waits for no host."""
    kernels = kernel_profile_of(call)
    return Workload(
        graph=Graph.empty(call.batch_size),
        precision=kernels.precision,
        memory_format=call.memory_format,
        optimizer=call.optimizer or Optimizer.SGD,
        phase=Phase.TRAIN,
        scope=StepScope(updates=call.optimizer is not None, waits_for_host=False),
        kernels=kernels,
    )


def kernel_evidence(
    device: str, source: str, spec: DeviceSpec, times_ms: Iterable[tuple[KernelCall, float]]
) -> Evidence:
    """Kernels that one source timed on a device.

    Args:
        device: whose constants they are evidence for.
        source: whose launches are within the times.
        spec: without TF32 where none of them used it.
        times_ms: of each call.
    """
    rows = [(kernel_workload(call), time_ms) for call, time_ms in times_ms]
    values: Array = np.log([time_ms for _, time_ms in rows])
    return Evidence(device, source, spec, [workload for workload, _ in rows], values)


def measured_evidence(
    spec: DeviceSpec, measurements: Iterable[KernelMeasurement]
) -> list[Evidence]:
    """Return a device's `ok` kernels as evidence, at most `MOST_KERNELS`.

    Kernels that were kept from TF32 are of a device without it. Matrix products that had it are
    left out, as none of a step has it.
    """
    timed = [
        (m.call, m.time_ms)
        for m in measurements
        if m.outcome is Outcome.OK and m.time_ms and not m.call.form.is_collective
    ]
    timed.sort(key=lambda row: row[0].text)
    wide = [row for row in timed if row[0].tf32 or row[0].data_type is not DataType.FP32]
    parts = [
        (spec, [row for row in wide if not row[0].tf32 or row[0].operator is Operator.CONV2D]),
        (replace(spec, tf32_tflops=None), [row for row in timed if row not in wide]),
    ]
    share = min(1.0, MOST_KERNELS / max(1, len(timed)))
    evidence = []
    for own, rows in parts:
        chosen = np.linspace(0, len(rows) - 1, round(share * len(rows))).round().astype(int)
        if len(chosen):
            evidence.append(kernel_evidence("", "kernels", own, [rows[i] for i in chosen]))
    return evidence


MOST_KERNELS = 300
"""Largest number of kernels per device, that of a catalogue."""
