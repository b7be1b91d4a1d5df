"""How far simulated step times of data-centre GPUs are off without any label of theirs.

    PYTHONPATH=. python benchmarks/learner/step_time_nodes.py ../shared/data/nodes --traces FOLDER

Steps in fp32 (TF32 in convolutions on an A100) and autocast that others measured: pycls on V100,
pytorch-gpu-benchmark and NVIDIA's DeepLearningExamples on V100 and A100, one GPU but for pycls.
Nothing is fitted. Each source times something else (the data loader, no optimizer, the copy to the
device), as its README says; so the figures are for comparing forms of the prior, here with and
without a peak of TF32.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from trappm.learner.physics.device_specs import DeviceSpec, spec_of
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.profiler.errors import TrappmError
from trappm.profiler.records import Graph, MemoryFormat, Optimizer, Phase, Precision
from trappm.profiler.simulation.kernel_profile import KernelProfile
from trappm.profiler.static_profile import kernel_profile


@dataclass(frozen=True)
class Step:
    """One published step."""

    source: str
    device: str
    architecture: str
    batch_size: int
    input_size: int
    precision: Precision
    memory_format: MemoryFormat
    phase: Phase
    step_ms: float


def published(data: Path) -> Iterator[Step]:
    """The rows of one GPU whose models timm has, without those that are marked as doubtful."""
    for file, batch, size, ms in (
        ("pycls_v100_step_fp32.csv", "per_gpu_batch", "img_size", "step_ms"),
        ("pgb_torchvision_step.csv", "per_gpu_batch", "img_size", "median_ms"),
        ("dle_train_throughput.csv", "per_gpu_micro_batch", "img_size", "micro_step_ms_derived"),
    ):
        sheet = pd.read_csv(data / file)
        of_us = sheet["device"].str.startswith(("V100", "A100")) & sheet["timm_name"].notna()
        of_us &= sheet["precision"].isin(["fp32", "tf32", "amp"])
        if not file.startswith("pycls"):
            of_us &= (sheet["n_gpus"] == 1) & sheet["suspect"].isna()
        for row in sheet[of_us].to_dict("records"):
            if not np.isfinite([row[batch], row[size], row[ms]]).all():
                continue
            yield Step(
                source=file.split("_")[0],
                device=str(row["device"]).split(" ")[0],
                architecture=str(row["timm_name"]),
                batch_size=int(row[batch]),
                input_size=int(row[size]),
                precision=Precision.AMP_FP16 if row["precision"] == "amp" else Precision.FP32,
                memory_format=MemoryFormat(
                    str(row.get("memory_format", "contiguous")).replace("_", "-")
                ),
                phase=Phase.INFER if row["phase"] == "infer" else Phase.TRAIN,
                step_ms=float(row[ms]),
            )


def _kernels(step: Step, folder: Path) -> KernelProfile | None:
    path = folder / f"{step.architecture}@{step.input_size}-{step.precision}-{step.memory_format}"
    if not path.exists():
        try:
            profile = kernel_profile(
                step.architecture,
                step.input_size,
                precision=step.precision,
                memory_format=step.memory_format,
            )
        except TrappmError as error:
            print(f"left out: {error}")
            return None
        path.write_bytes(profile.to_bytes())
    return KernelProfile.from_bytes(path.read_bytes())


def _predicted(step: Step, kernels: KernelProfile, spec: DeviceSpec) -> float:
    workload = Workload(
        graph=Graph.empty(step.batch_size),
        precision=step.precision,
        memory_format=step.memory_format,
        optimizer=Optimizer.MOMENTUM,
        phase=step.phase,
        kernels=kernels,
    )
    return float(np.exp(StepTimePrior(spec).log_values([workload])[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--traces", type=Path, required=True, help="where kernels are kept")
    options = parser.parse_args()
    options.traces.mkdir(parents=True, exist_ok=True)
    rows = []
    for step in published(options.data):
        kernels = _kernels(step, options.traces)
        if kernels is None:
            continue
        spec = spec_of(step.device)
        plain = dataclasses.replace(spec, tf32_tflops=None)
        rows.append(
            {
                **dataclasses.asdict(step),
                "tf32": _predicted(step, kernels, spec) / step.step_ms,
                "no_tf32": _predicted(step, kernels, plain) / step.step_ms,
            }
        )
    table = pd.DataFrame(rows)
    print("predicted over measured, without TF32 and with it: median; MAPE in %")
    for key, group in table.groupby(["source", "device", "precision", "phase"]):
        errors = [
            f"{group[form].median():5.2f} {100 * (group[form] - 1).abs().mean():6.1f}"
            for form in ("no_tf32", "tf32")
        ]
        print(f"{' '.join(map(str, key)):44} {len(group):4}  {'   '.join(errors)}")


if __name__ == "__main__":
    main()
