"""What steps in channels-last add to the constants of an A100 and a V100 in autocast.

    PYTHONPATH=. python benchmarks/learner/constants/nvidia_steps.py ../shared/data --traces FOLDER

Judged on NVIDIA's DeepLearningExamples, the only published steps of these cards in autocast and
channels-last. A card's constants are fitted on what else ships, then with timm's channels-last
steps of an RTX 3090, then with NVIDIA's large batches of the other of the two models, which is
what ships but for the judged model. docs/studies/step_time_constants.md has the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.learner.other_devices import evidence_of_all
from benchmarks.learner.step_time_nodes import NVIDIA, TWINS, Steps, learned_from, nvidia_steps
from trappm.learner.physics.devices.joint_fit import Evidence
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.profiler.records import MemoryFormat, Precision


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
    parts = [
        *(steps.evidence for steps in known if not steps.evidence.host.startswith(NVIDIA)),
        *kernels,
    ]
    before = [part for part in parts if not _channels_last(part)]
    of_nvidia = nvidia_steps(options.data / "nodes", options.traces, least_batch=1)
    judge(before, of_nvidia, "without channels-last")
    judge(parts, of_nvidia, "with timm's of the RTX 3090")
    large = nvidia_steps(options.data / "nodes", options.traces)
    for name, _ in TWINS.values():
        other = [steps.at(steps.architectures != name).evidence for steps in large]
        own = [steps.at(steps.architectures == name) for steps in of_nvidia]
        judge([*parts, *other], own, f"and NVIDIA's, judged on {name}")


def _channels_last(part: Evidence) -> bool:
    return all(w.memory_format is MemoryFormat.CHANNELS_LAST for w in part.workloads)


if __name__ == "__main__":
    main()
