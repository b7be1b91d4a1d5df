"""Sizes and training settings of the networks: the paper's, and one for a laptop core."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trappm.profiler.errors import InputError, nearest


@dataclass(frozen=True, kw_only=True)
class EncoderPreset:
    """Graph autoencoder: SAGEConv layers, each with batch norm, ReLU and dropout."""

    widths: tuple[int, ...]
    """Output width of each layer; the last is the width of the embedding."""
    dropout: float
    learning_rate: float
    steps: int
    """Largest number of steps: training ends where more do not help."""
    batch_nodes: int
    """Number of nodes at which a batch of graphs is full, which bounds the memory."""
    one_batch_size: bool = False
    """Learn from one batch size of each architecture, since the others are near-copies."""
    distinct: bool = True
    """Compute equal nodes of a batch once (`distinct_nodes`)."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training of a network on labels, from scratch or from another device's weights."""

    learning_rate: float
    weight_decay: float
    fine_tune_learning_rate: float
    steps: int
    """Largest number of steps, as for the encoder."""
    batch_nodes: int
    """Number of nodes per batch, as for the encoder."""
    loss: str = "squared-log"
    """One of `learner.paper.regressor.LOSSES`."""
    members: int = 1
    """Number of networks, each trained without a fold of the architectures. The prediction is their
    mean, the uncertainty their spread."""


@dataclass(frozen=True, kw_only=True)
class HeadPreset(Training):
    """Regressors: SAGEConv layers, sum pool, then fully connected layers."""

    widths: tuple[int, ...]
    """Output width of each SAGEConv layer."""
    hidden: tuple[int, ...]
    """Output width of each fully connected layer before the linear one."""
    dropout: float
    physical_prior: bool
    """True if heads have a physical prior (`learner.heads.physics_heads`) instead of a network."""
    distinct: bool = True
    """Compute equal nodes of a batch once (`distinct_nodes`)."""


@dataclass(frozen=True, kw_only=True)
class LearnerPreset:
    """An encoder with the heads that use its embeddings."""

    name: str
    encoder: EncoderPreset
    head: HeadPreset


PAPER = LearnerPreset(
    name="paper",
    encoder=EncoderPreset(
        widths=(1024, 512, 512, 512),
        dropout=0.5,
        learning_rate=5e-4,
        steps=4_000,
        batch_nodes=16_384,
    ),
    head=HeadPreset(
        widths=(512, 512),
        hidden=(512, 512),
        dropout=0.05,
        learning_rate=1e-3,
        weight_decay=0.0,
        steps=3_000,
        fine_tune_learning_rate=1e-4,
        batch_nodes=16_384,
        physical_prior=False,
    ),
)

# Round sizes for one core of a laptop; not tuned in a whole study (docs/research/accuracy.md).
LAPTOP = LearnerPreset(
    name="laptop",
    encoder=EncoderPreset(
        widths=(64, 32, 32, 32),
        dropout=0.1,
        learning_rate=3e-3,
        steps=700,
        batch_nodes=4_096,
        one_batch_size=True,
    ),
    head=HeadPreset(
        widths=(32, 32),
        hidden=(32, 32),
        dropout=0.0,
        learning_rate=1e-2,
        weight_decay=1e-2,
        steps=2_000,
        fine_tune_learning_rate=1e-3,
        batch_nodes=16_384,
        physical_prior=True,
    ),
)

MEMBERS = 5
"""Networks of an ensemble, one for each fold of the architectures."""
PAPER_ENSEMBLE = replace(PAPER, name="paper-ensemble", head=replace(PAPER.head, members=MEMBERS))
"""The paper's networks with the spread that its acquisition needs."""
PAPER_SMALL = replace(
    LAPTOP,
    name="paper-small",
    head=replace(LAPTOP.head, physical_prior=False, members=MEMBERS, steps=200),
)
"""The papers' learner in sizes for two CPU cores: what the campaign preset `paper` trains."""

PRESETS = {preset.name: preset for preset in (PAPER, PAPER_ENSEMBLE, PAPER_SMALL, LAPTOP)}


def preset_named(name: str) -> LearnerPreset:
    """Return the learner preset of this name; raise InputError for an unknown name."""
    if name in PRESETS:
        return PRESETS[name]
    raise InputError(f"no learner preset {name!r}; {nearest(name, PRESETS)}")
