"""Sizes and training settings of the networks: the paper's, and one for a laptop core.

`paper` is the architecture of the TraPPM paper (graph autoencoder and regressor). Two settings in
it are not the paper's: the ensemble, since a single head cannot say how sure it is, and the loss,
which is relative because the errors that are reported are percentages.
"""

from __future__ import annotations

from dataclasses import dataclass

from trappm.profiler.errors import InputError
from trappm.profiler.nearest import nearest


@dataclass(frozen=True, kw_only=True)
class EncoderPreset:
    """The graph autoencoder: SAGEConv layers, each with batch norm, ReLU and dropout."""

    widths: tuple[int, ...]
    """Output width of each SAGEConv layer; the last is the width of the embedding."""
    dropout: float
    learning_rate: float
    epochs: int
    batch_nodes: int
    """Graphs are batched until they have this many nodes together, which bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained on labels, from scratch or from another device's weights."""

    learning_rate: float
    weight_decay: float
    epochs: int
    fine_tune_epochs: int
    fine_tune_learning_rate: float
    batch_nodes: int
    """As for the encoder."""


@dataclass(frozen=True, kw_only=True)
class HeadPreset(Training):
    """The heads: SAGEConv layers, sum pool, then fully connected layers, for each ensemble member.

    A member never sees one of the `members` folds of the architectures; what it predicts there
    tells how far the heads can be trusted.
    """

    widths: tuple[int, ...]
    """Output width of each SAGEConv layer."""
    hidden: tuple[int, ...]
    """Output width of each fully connected layer before the linear one."""
    dropout: float
    members: int
    physical_prior: bool
    """Learn what is left after the physical prior; without it, after the mean."""


@dataclass(frozen=True, kw_only=True)
class LearnerPreset:
    """An encoder with heads that fit it."""

    name: str
    encoder: EncoderPreset
    head: HeadPreset


PAPER = LearnerPreset(
    name="paper",
    encoder=EncoderPreset(
        widths=(1024, 512, 512, 512),
        dropout=0.5,
        learning_rate=5e-4,
        epochs=400,
        batch_nodes=16_384,
    ),
    head=HeadPreset(
        widths=(512, 512),
        hidden=(512, 512),
        dropout=0.05,
        learning_rate=1e-3,
        weight_decay=0.0,
        epochs=100,
        fine_tune_epochs=100,
        fine_tune_learning_rate=1e-4,
        members=5,
        batch_nodes=16_384,
        physical_prior=False,
    ),
)

# Round sizes for one core of a laptop; not tuned in a whole study (docs/accuracy.md).
LAPTOP = LearnerPreset(
    name="laptop",
    encoder=EncoderPreset(
        widths=(64, 32, 32, 32),
        dropout=0.1,
        learning_rate=3e-3,
        epochs=60,
        batch_nodes=4_096,
    ),
    head=HeadPreset(
        widths=(32, 32),
        hidden=(32, 32),
        dropout=0.0,
        learning_rate=1e-2,
        weight_decay=1e-2,
        epochs=40,
        fine_tune_epochs=20,
        fine_tune_learning_rate=1e-3,
        members=5,
        batch_nodes=16_384,
        physical_prior=True,
    ),
)

PRESETS = {preset.name: preset for preset in (PAPER, LAPTOP)}


def preset_named(name: str) -> LearnerPreset:
    """Raises InputError for a name that is no learner preset."""
    if name in PRESETS:
        return PRESETS[name]
    raise InputError(f"no learner preset {name!r}; {nearest(name, PRESETS)}")
