"""What steps in channels-last would add to the constants of an A100 and a V100 in autocast.

    PYTHONPATH=. python benchmarks/learner/constants/nvidia_steps.py ../shared/data --traces FOLDER

Judged on NVIDIA's DeepLearningExamples, the only published steps of these cards in autocast and
channels-last: EfficientNet-B0 and B4 with wide squeeze-excitation. timm has no such models, but
those of narrower squeeze-excitation, whose kernels are the same but for two products of one pixel a
block; so they stand for them, here and nowhere else. A card's constants are fitted on all that
ships, then with timm's channels-last steps of an RTX 3090, then with NVIDIA's of the other model.
docs/studies/step_time_constants.md has the table.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.learner.other_devices import evidence_of_all
from benchmarks.learner.step_time_nodes import (
    Steps,
    device_of,
    learned_from,
    timm_steps,
    traced_step,
)
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.devices.joint_fit import Evidence
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.profiler.records import (
    Configuration,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
)
from trappm.profiler.records.step_scope import WHOLE_STEP

TWINS = {
    "efficientnet-widese-b0": ("efficientnet_b0", 224),
    "efficientnet-widese-b4": ("efficientnet_b4", 380),
}
"""The model of timm that stands for NVIDIA's, and its input size."""
TRAINING = {"per_gpu_micro_batch": "batch", "micro_step_ms_derived": "step_ms"}
INFERENCE = {"per_gpu_batch": "batch", "latency_from_throughput_ms": "step_ms"}
"""Columns of the two sheets. Latencies have outliers in their means, throughputs have not."""
SOURCE = "deep-learning-examples"


def nvidia_steps(nodes: Path, traces: Path) -> list[Steps]:
    """By card; without rows that the sheet calls suspect, or that more than one GPU shares."""
    training = pd.read_csv(nodes / "dle_train_throughput.csv").rename(columns=TRAINING)
    training = training[(training.n_gpus == 1) & training.suspect.isna()]
    inference = pd.read_csv(nodes / "dle_infer_latency.csv").rename(columns=INFERENCE)
    sheet = pd.concat([training.assign(phase=Phase.TRAIN), inference.assign(phase=Phase.INFER)])
    rows: dict[str, list[tuple[Workload, str, float]]] = defaultdict(list)
    for row in sheet[sheet.model.isin(TWINS) & sheet.step_ms.notna()].to_dict("records"):
        name, size = TWINS[str(row["model"])]
        half = row["precision"] == "amp"
        workload = traced_step(
            Configuration(
                architecture=name,
                batch_size=int(row["batch"]),
                input_size=size,
                phase=row["phase"],
                precision=Precision.AMP_FP16 if half else Precision.FP32,
                # NVIDIA's scripts take channels-last in autocast, and in nothing else.
                memory_format=MemoryFormat.CHANNELS_LAST if half else MemoryFormat.CONTIGUOUS,
                optimizer=Optimizer.MOMENTUM,
            ),
            WHOLE_STEP,
            traces,
        )
        if workload is not None:
            rows[str(row["device"]).lower()].append((workload, name, float(row["step_ms"])))
    return [
        Steps(
            Evidence(
                device_of(device),
                f"{SOURCE} {device}",
                spec_of(device),
                [workload for workload, _, _ in labelled],
                np.log([step_ms for _, _, step_ms in labelled]),
            ),
            np.array([name for _, name, _ in labelled]),
            np.array([workload.phase is Phase.TRAIN for workload, _, _ in labelled]),
        )
        for device, labelled in rows.items()
    ]


def judge(evidence: Iterable[Evidence], judged: Iterable[Steps], what: str) -> None:
    """Prints a line a card, phase and precision: mean error, and how far too slow or fast."""
    fit = learned_from(evidence)
    for steps in judged:
        of_card = steps.evidence
        prior = StepTimePrior(of_card.spec, fit.constants(of_card.device))
        off = np.exp(prior.log_values(of_card.workloads) - of_card.log_values) - 1
        precisions = np.array([workload.precision for workload in of_card.workloads])
        for phase, of_phase in (("training", steps.trains), ("inference", ~steps.trains)):
            for precision in (Precision.FP32, Precision.AMP_FP16):
                errors = 100 * off[of_phase & (precisions == precision)]
                if not len(errors):
                    continue
                sys.stdout.write(
                    f"{what:44} {of_card.device:5} {phase:9} {precision:9} {len(errors):3} rows "
                    f"{np.abs(errors).mean():5.1f} % {np.median(errors):+6.1f}\n"
                )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with the published labels")
    parser.add_argument("--traces", type=Path, required=True, help="where kernels are kept")
    options = parser.parse_args()
    known, kernels = evidence_of_all(options.data, options.traces)
    ships = [*(steps.evidence for steps in known), *kernels]
    more = [*ships, timm_steps(options.data, options.traces, "train-nhwc").evidence]
    of_nvidia = nvidia_steps(options.data / "nodes", options.traces)
    judge(ships, of_nvidia, "what ships")
    judge(more, of_nvidia, "with channels-last of the RTX 3090")
    for name, _ in TWINS.values():
        other = [steps.at(steps.architectures != name).evidence for steps in of_nvidia]
        own = [steps.at(steps.architectures == name) for steps in of_nvidia]
        judge([*more, *other], own, f"and NVIDIA's, judged on {name}")


if __name__ == "__main__":
    main()
