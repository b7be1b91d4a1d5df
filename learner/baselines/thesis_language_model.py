"""The thesis's language model that reads a graph: embedding and prompt in, a number out.

K. Panner Selvam's PhD thesis, chapter 7: a graph encoder that learned without labels and is frozen
(the paper's autoencoder, or GraphMAE), a projection of its embedding into the space of a causal
language model's tokens, that model with low-rank adapters (Hu et al. 2022) over these and a prompt
that tells the configuration, and a regression over the last hidden state.

Our choices, where our notes of the thesis are silent: how many tokens a graph becomes, the hidden
layer of the projection, the prompt's words, adapters as peft places them by default, and the
training, which is that of all networks here. The loss is of the logarithm. Without weights the
language model is a tiny one at random (`adapted_decoders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from trappm.learner.baselines.adapted_decoders import Decoder
from trappm.learner.estimator import Model, Targets
from trappm.learner.networks.dataset import IntArray
from trappm.learner.networks.estimator import LEAST_LABELS, NetworkEstimator, NetworkModel
from trappm.learner.networks.gae import Encoder
from trappm.learner.networks.presets import LAPTOP, Training
from trappm.learner.workload import Workload
from trappm.profiler.records import Phase

GRAPH_TOKENS = 4
TRAINING = Training(
    learning_rate=3e-3,
    weight_decay=LAPTOP.head.weight_decay,
    fine_tune_learning_rate=3e-4,
    steps=600,
    batch_nodes=LAPTOP.head.batch_nodes,
)
"""Round numbers."""


class LanguageNetwork(nn.Module):
    """Projected graph, prompt, language model, a linear output over the last hidden state."""

    def __init__(self, vector_width: int, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.words = decoder.get_input_embeddings()  # type: ignore[operator]
        width = int(self.words.embedding_dim)
        self.projection = nn.Sequential(
            nn.Linear(vector_width, width), nn.GELU(), nn.Linear(width, GRAPH_TOKENS * width)
        )
        self.output = nn.Linear(width, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        if torch.cuda.is_available():  # a real language model takes hours on a CPU
            self.cuda()

    def forward(self, data: Batch) -> Tensor:
        """(graphs, 1) for a batch with `vector` and `tokens`."""
        device, precision = self.words.weight.device, self.words.weight.dtype
        vector, tokens = data.vector.to(device), data.tokens.to(device)
        graph = self.projection(vector).view(len(vector), GRAPH_TOKENS, -1).to(precision)
        words = tokens >= 0
        inputs = torch.cat([graph, self.words(tokens.clamp(min=0))], dim=1)
        mask = torch.cat([words.new_ones(len(words), GRAPH_TOKENS), words], dim=1).long()
        hidden = self.decoder(inputs_embeds=inputs, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(hidden), device=device), mask.sum(dim=1) - 1]
        output: Tensor = self.output(last.float()).cpu()
        return output


@dataclass(frozen=True, eq=False)
class ThesisLanguageModel:
    """Fits projection, adapters and regression; encoder and language model stay as they are."""

    name: str
    encoder: Encoder
    """Frozen."""
    card: str
    """As the prompt names the device."""
    decoder: Decoder
    training: Training = TRAINING
    least_labels: ClassVar[int] = LEAST_LABELS

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> NetworkModel:
        """As `learner.estimator.Estimator`."""
        estimator = NetworkEstimator(
            name=self.name,
            network=lambda width, _nodes: LanguageNetwork(width, self.decoder.make()),
            vector=lambda some: self.encoder.embed([workload.graph for workload in some]),
            training=self.training,
            tokens=self.tokens,
        )
        return estimator.fit(workloads, targets, generator, start)

    def tokens(self, workloads: Sequence[Workload]) -> IntArray:
        """Of the prompts (n, t), padded with -1 at the end, where nothing before sees it."""
        rows = [self.decoder.token_ids(prompt(workload, self.card)) for workload in workloads]
        padded = np.full((len(rows), max(map(len, rows), default=0)), -1, dtype=np.int64)
        for row, tokens in zip(padded, rows, strict=True):
            row[: len(tokens)] = tokens
        return padded


def prompt(workload: Workload, card: str) -> str:
    """The configuration in words, but for the graph."""
    phase = "training" if workload.phase is Phase.TRAIN else "inference"
    shape = workload.graph.input_shapes[0]
    size = shape[shape > 0][-1]  # of what comes first: pixels, or tokens; the rest is padding
    return f"{phase} on {card}, batch {workload.batch_size}, size {size}, {workload.precision}"
