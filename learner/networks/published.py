"""TraPPM as published, with the faults of its code repaired: what everything else is compared with.

Karthick Panner Selvam and Mats Brorsson, "TraPPM": a graph autoencoder learns from graphs without
labels (`gae`), its frozen encoder embeds a graph, and one regressor for each metric
(`regressor`) joins its own two SAGEConv layers with that embedding and six static features.
Sizes and settings are those of the preset `paper`. Repaired, as against the published code:

- static features are scaled over the data set, not over the six numbers of one sample; sizes stand
  as logarithms beside the one-hot operator, and parameters, MACs and batch sizes are right
  (`profiler.static_profile`);
- each graph has one label of shape (1, 1), the encoder is frozen without gradients and run once for
  each graph, and no sample is lost;
- the loss is relative, as the errors that are reported; no checkpoint is picked by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

from trappm.learner.estimator import Model, Targets
from trappm.learner.networks.dataset import FloatArray, fit_node_scaler, join_vectors
from trappm.learner.networks.estimator import (
    LEAST_LABELS,
    NetworkEstimator,
    NetworkModel,
    squared_log,
)
from trappm.learner.networks.gae import Encoder, EncoderNetwork
from trappm.learner.networks.presets import EncoderPreset, HeadPreset, LearnerPreset
from trappm.learner.networks.randomness import torch_seeded
from trappm.learner.networks.regressor import HeadNetwork, OnEpoch
from trappm.learner.workload import Workload
from trappm.profiler.records import Graph


@dataclass(frozen=True, eq=False)
class TrappmAsPublished:
    """The paper's predictor over a pre-trained encoder."""

    preset: LearnerPreset
    encoder: Encoder
    """Pre-trained (`learner.networks.gae.train_encoder`), or random for the ablation."""
    suffix: str = ""
    """Of the name, to tell an ablation apart."""
    on_epoch: OnEpoch = lambda done, total: None
    _embeddings: WeakKeyDictionary[Graph, FloatArray] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    least_labels: ClassVar[int] = LEAST_LABELS

    @property
    def name(self) -> str:
        return f"trappm-{self.preset.name}{self.suffix}"

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> NetworkModel:
        """Trains one regressor; from `start` it goes on as the paper's Table V (V100 from A100)."""
        nodes = float(np.mean([w.graph.node_count for w in workloads])) if workloads else 1.0
        estimator = NetworkEstimator(
            name=self.name,
            network=partial(_regressor, self.preset.head, self.encoder.width, nodes),
            vector=self._vectors,
            loss=squared_log,
            training=self.preset.head,
            on_epoch=self.on_epoch,
        )
        return estimator.fit(workloads, targets, generator, start)

    def embed(self, graphs: Sequence[Graph]) -> FloatArray:
        """The encoder's embeddings (n, width); each graph goes through it once."""
        new = [graph for graph in dict.fromkeys(graphs) if graph not in self._embeddings]
        for graph, row in zip(new, self.encoder.embed(new), strict=True):
            self._embeddings[graph] = row
        rows = [self._embeddings[graph] for graph in graphs]
        return np.array(rows, dtype=np.float32).reshape(len(graphs), self.encoder.width)

    def _vectors(self, graphs: Sequence[Graph]) -> FloatArray:
        return join_vectors(graphs, self.embed(graphs))


def random_encoder(
    graphs: Sequence[Graph], preset: EncoderPreset, generator: np.random.Generator
) -> Encoder:
    """An encoder that learned nothing, for the ablation (paper, "random encoder").

    Its inputs are scaled as those of a trained one.
    """
    with torch_seeded(generator):
        network = EncoderNetwork(preset).eval().requires_grad_(False)
    return Encoder(preset, network, fit_node_scaler(graphs))


def _regressor(
    preset: HeadPreset, embedding_width: int, mean_nodes: float, _vector_width: int
) -> nn.Module:
    network = HeadNetwork(preset, embedding_width, outputs=1)
    network.mean_nodes.fill_(mean_nodes)
    return network
