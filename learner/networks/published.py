"""TraPPM as published, with the faults of its code repaired: what everything else is compared with.

Karthick Panner Selvam and Mats Brorsson, "TraPPM": a graph autoencoder learns from graphs without
labels (`gae`), its frozen encoder embeds a graph, and one regressor for each metric
(`regressor`) joins its own two SAGEConv layers with that embedding and six static features.
Sizes and settings are those of the preset `paper`. Campaigns train the same
(`learner.heads.network_heads`). Repaired, as against the published code:

- static features are scaled over the data set, not over the six numbers of one sample; sizes stand
  as logarithms beside the one-hot operator, and parameters, MACs and batch sizes are right
  (`profiler.static_profile`);
- each graph has one label of shape (1, 1), the encoder is frozen without gradients and run once for
  each graph, and no sample is lost;
- the loss is relative, as the errors that are reported, and what ends a training, and picks its
  checkpoint, are architectures that it does not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from trappm.learner.estimator import Model, Targets
from trappm.learner.networks.dataset import FloatArray, fit_node_scaler, join_vectors
from trappm.learner.networks.estimator import LEAST_LABELS, NetworkEstimator, NetworkModel
from trappm.learner.networks.gae import Encoder, EncoderNetwork
from trappm.learner.networks.presets import EncoderPreset, HeadPreset
from trappm.learner.networks.randomness import torch_seeded
from trappm.learner.networks.regressor import HeadNetwork
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError
from trappm.profiler.progress import OnProgress
from trappm.profiler.records import Graph


@dataclass(frozen=True, eq=False)
class TrappmAsPublished:
    """The paper's predictor over a pre-trained encoder."""

    name: str
    preset: HeadPreset
    encoder: Encoder | None = None
    """Pre-trained (`learner.networks.gae.train_encoder`), or random for the ablation; None where
    workloads come with their embeddings."""
    on_step: OnProgress = lambda done, total: None
    _embeddings: WeakKeyDictionary[Graph, FloatArray] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    least_labels: ClassVar[int] = LEAST_LABELS

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> NetworkModel:
        """Trains one regressor; from `start` it goes on as the paper's Table V (V100 from A100)."""
        estimator = NetworkEstimator(
            name=self.name,
            network=lambda width, nodes: HeadNetwork(self.preset, width, nodes),
            vector=embedded_vectors if self.encoder is None else self._vectors,
            training=self.preset,
            on_step=self.on_step,
        )
        return estimator.fit(workloads, targets, generator, start)

    def embed(self, graphs: Sequence[Graph]) -> FloatArray:
        """The encoder's embeddings (n, width); each graph goes through it once.

        Raises:
            InputError: there is no encoder.
        """
        if self.encoder is None:
            raise InputError(f"{self.name} has no encoder to embed graphs with")
        new = [graph for graph in dict.fromkeys(graphs) if graph not in self._embeddings]
        for graph, row in zip(new, self.encoder.embed(new), strict=True):
            self._embeddings[graph] = row
        rows = [self._embeddings[graph] for graph in graphs]
        return np.array(rows, dtype=np.float32).reshape(len(graphs), self.encoder.width)

    def _vectors(self, workloads: Sequence[Workload]) -> FloatArray:
        return join_vectors(workloads, self.embed([workload.graph for workload in workloads]))


def embedded_vectors(workloads: Sequence[Workload]) -> FloatArray:
    """Embedding and static features of workloads (n, width + 6), not scaled.

    Raises:
        InputError: a workload without embedding.
    """
    rows = [w.embedding for w in workloads if w.embedding is not None]
    if len(rows) != len(workloads):
        raise InputError("a workload has no embedding, which networks need; encode its graph")
    return join_vectors(workloads, np.array(rows, dtype=np.float32))


def random_encoder(
    graphs: Sequence[Graph], preset: EncoderPreset, generator: np.random.Generator
) -> Encoder:
    """An encoder that learned nothing, for the ablation (paper, "random encoder").

    Its inputs are scaled as those of a trained one.
    """
    with torch_seeded(generator):
        network = EncoderNetwork(preset).eval().requires_grad_(False)
    return Encoder(preset, network, fit_node_scaler(graphs))
