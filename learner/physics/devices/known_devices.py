"""Constants of GPUs without labels, learned from published steps and kernels.

`known_devices.safetensors` is written by `python -m research fit-priors step-time`, from the
sources of `LEARNED_FROM`. The V100's heads of the shipped snapshot start from it; heads of
campaigns start from the specification (`starting_prior`).
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save_file

from trappm.learner.physics.devices.joint_fit import Distribution

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
