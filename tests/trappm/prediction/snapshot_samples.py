"""Snapshots for the tests of predictions, with heads that ship or that are trained a little."""

import numpy as np

from trappm.learner.heads.physics_heads import train_heads
from trappm.learner.interface import TrainedHeads, TrainingLabel, Workload
from trappm.learner.paper.encoder import train_encoder
from trappm.learner.paper.presets import LAPTOP
from trappm.learner.snapshots.registry import Registry
from trappm.learner.snapshots.snapshot import load_snapshot, save_snapshot
from trappm.prediction.selection import SHIPPED
from trappm.profiler.records import Phase, Provenance
from trappm.profiler.trace import trace

NAMES = ("test_resnet", "test_vit", "test_convnext")
BATCHES = (1, 2, 4, 8)


def shipped_heads(device):
    """The heads of a device that ship with the package."""
    return load_snapshot(SHIPPED).heads[device]


def snapshot_of(folder, heads, *, preset=LAPTOP, encoder=None, labels=(), **fields):
    """The folder of a snapshot with these heads by device; the first device is the source."""
    return save_snapshot(
        folder, encoder=encoder, heads=heads, source_device=next(iter(heads)), preset=preset,
        labels=labels, fields=fields,
    ).folder  # fmt: skip


def imported_label(device):
    """A label that others published."""
    return TrainingLabel("0" * 16, device, "train", (None, 900.0, None), Provenance.IMPORTED)


def publish(registry, heads):
    """The id of such a snapshot, which is now the latest of a registry."""
    made = snapshot_of(registry, heads).name
    Registry(registry).set_alias("latest", made, "published")
    return made


def graphs():
    """Graphs of three models at four batch sizes."""
    templates = [trace(name, 64, phase=Phase.INFER).graph for name in NAMES]
    return [template.at(batch) for template in templates for batch in BATCHES]


def trained(targets, preset, encoder=None):
    """Heads of training steps, from labels of these graphs."""
    some = graphs()
    rows = [None] * len(some) if encoder is None else encoder.embed(some)
    heads = train_heads(
        [Workload(graph=graph, embedding=row) for graph, row in zip(some, rows, strict=True)],
        targets, groups=[name for name in NAMES for _ in BATCHES], preset=preset,
        generator=np.random.default_rng(0),
    )  # fmt: skip
    return {Phase.TRAIN: TrainedHeads(heads, ())}


def hasty_encoder(preset):
    """An encoder that hardly learns."""
    return train_encoder(graphs(), preset, np.random.default_rng(0))
