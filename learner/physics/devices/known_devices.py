"""Constants of GPUs without labels, learned from published steps and kernels.

`known_devices.safetensors` is written by `python -m research fit-priors step-time`; the V100's
heads of the shipped snapshot start from it. Heads of campaigns start from the most similar card
(`learner.heads.physics_heads`) and move as far as devices differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

FILE = Path(__file__).parent / "known_devices.safetensors"


@dataclass(frozen=True, eq=False)
class KnownDevices:
    """Constants of step times that known devices have in common."""

    centre: Tensor
    """Mean of the constants (c)."""
    spreads: Tensor
    """Deviation of the constants of a device and its host (c)."""


@cache
def known_devices() -> KnownDevices:
    """Return the constants that come with the package."""
    tensors = load_file(FILE)
    spreads = (tensors["device"] ** 2 + tensors["host"] ** 2).sqrt()
    return KnownDevices(tensors["centre"], spreads)
