"""Frozen encoders: pre-trained once on the graphs at hand, without labels, and kept in a folder.

Pre-training sees graphs and no labels, so as in the paper it may see those whose labels are held
out. The laptop preset learns from one batch size of each architecture, since batch variants are
near-copies; the paper's learns from all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trappm.learner.networks.gae import Encoder, train_encoder
from trappm.learner.networks.presets import EncoderPreset
from trappm.learner.networks.published import random_encoder
from trappm.profiler.records import Graph

FORMAT = 3
"""Counted up when training changes, so that no older encoder is taken for a new one."""


def make_encoder(
    graphs: Sequence[Graph],
    architectures: Sequence[str],
    preset: EncoderPreset,
    *,
    pretrained: bool,
    seed: int,
    cache: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Encoder:
    """An encoder that follows from graphs, preset and seed; one trained before is read back.

    Args:
        graphs: all that are at hand (n).
        architectures: of each (n).
        preset: its sizes and training.
        pretrained: False for one that learned nothing.
        seed: of everything random.
        cache: the folder of those trained before.
        on_progress: called with steps done and steps at most.
    """
    generator = np.random.default_rng(seed)
    if preset.one_batch_size:
        graphs = _one_of_each(graphs, architectures, generator)
    if not pretrained:
        return random_encoder(graphs, preset, generator)
    path = cache / f"encoder-{_name(graphs, preset, seed)}.safetensors"
    try:
        return Encoder.from_tensors(preset, load_file(path))
    except (OSError, SafetensorError, KeyError, RuntimeError):
        encoder = train_encoder(graphs, preset, generator, on_progress)
    cache.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in encoder.tensors().items()}, part)
    part.replace(path)
    return encoder


def _one_of_each(
    graphs: Sequence[Graph], architectures: Sequence[str], generator: np.random.Generator
) -> list[Graph]:
    variants: dict[str, dict[Graph, None]] = {}
    for graph, name in zip(graphs, architectures, strict=True):
        variants.setdefault(name, {})[graph] = None
    drawn = (list(variants[name]) for name in sorted(variants))
    return [alike[int(generator.integers(len(alike)))] for alike in drawn]


def _name(graphs: Sequence[Graph], preset: EncoderPreset, seed: int) -> str:
    digest = hashlib.sha256(repr((FORMAT, preset, seed)).encode())
    for graph in graphs:
        digest.update(repr(graph.operators).encode())
        for array in (graph.edges, graph.input_shapes, graph.output_shapes, graph.macs,
                      graph.parameters, graph.memory_bytes):  # fmt: skip
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]
