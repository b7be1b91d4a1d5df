"""A campaign's pool for its learner: graphs, profiles and embeddings in one order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from trappm.cluster.profiles import StepKey
from trappm.learner.paper.encoder import Encoder, make_encoder
from trappm.learner.paper.presets import EncoderPreset
from trappm.learner.physics.device_specs import has_kernels
from trappm.learner.stats.folds import content_groups
from trappm.learner.workload import Workload
from trappm.profiler.models.families import family_of
from trappm.profiler.progress import OnProgress
from trappm.profiler.records import Configuration, GraphTemplate, Pair
from trappm.profiler.records.graph import Graph
from trappm.profiler.simulation.step_profile import StepProfile


@dataclass(frozen=True, eq=False)
class EncodedPool:
    """A pool of n configurations with their workloads and embeddings, in one order."""

    configurations: Sequence[Configuration]
    encoder: Encoder
    embeddings: npt.NDArray[np.float32]
    """Shape (n, width)."""
    _workloads: Sequence[Workload]

    @classmethod
    def of(
        cls,
        pool: Sequence[tuple[Configuration, bytes]],
        steps: Mapping[Pair, bytes],
        traced: Mapping[StepKey, bytes],
        *,
        preset: EncoderPreset,
        seed: int,
        cache: Path,
        on_progress: OnProgress,
    ) -> Self:
        """Pre-train the encoder on the whole pool, or load the one trained on it before.

        Args:
            pool: Configurations with their graph templates.
            steps: Step profiles by architecture and input size.
            traced: Step profiles in other precisions and memory formats.
            preset: Preset of the encoder.
            seed: Seed of the encoder.
            cache: Folder of encoders.
            on_progress: Called with steps done and steps at most.
        """
        configurations = [configuration for configuration, _ in pool]
        graphs = _graphs(pool)
        encoder = make_encoder(
            graphs,
            [c.architecture for c in configurations],
            preset,
            pretrained=True,
            seed=seed,
            cache=cache,
            on_progress=on_progress,
        )
        embeddings = encoder.embed(graphs)
        stepped = {pair: StepProfile.from_bytes(data) for pair, data in steps.items()}
        own = {key: StepProfile.from_bytes(data) for key, data in traced.items()}

        def step_of(c: Configuration) -> StepProfile | None:
            return own.get(StepKey.of(c)) or stepped.get((c.architecture, c.input_size))

        workloads = [
            Workload(
                graph=graph,
                precision=c.precision,
                memory_format=c.memory_format,
                optimizer=c.optimizer,
                phase=c.phase,
                step=(step := step_of(c)),
                kernels=None if step is None else step.kernels_in(c.precision, c.memory_format),
                embedding=embedding,
            )
            for c, graph, embedding in zip(configurations, graphs, embeddings, strict=True)
        ]
        return cls(configurations, encoder, embeddings, workloads)

    def __len__(self) -> int:
        return len(self.configurations)

    def workloads(self, card: str) -> Sequence[Workload]:
        """Return workloads for heads of a card (n); without kernels if the card is unknown."""
        return self._workloads if has_kernels(card) else self._without_kernels

    @cached_property
    def _without_kernels(self) -> Sequence[Workload]:
        return [w if w.kernels is None else replace(w, kernels=None) for w in self._workloads]

    @cached_property
    def static_features(self) -> npt.NDArray[np.float64]:
        """Unscaled features of the configurations, shape (n, f)."""
        return np.stack([w.static_features for w in self._workloads])

    @cached_property
    def families(self) -> list[str]:
        return [family_of(c.architecture) for c in self.configurations]

    @cached_property
    def groups(self) -> list[str]:
        """Group that each configuration is held out with (n); identical models are one group."""
        names = [c.architecture for c in self.configurations]
        return content_groups(names, self._workloads)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Index of each configuration by its id."""
        return {c.id: i for i, c in enumerate(self.configurations)}

    def indices(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the indices of configurations by their ids."""
        return np.array([self.index[name] for name in names], dtype=np.int64)


def _graphs(pool: Sequence[tuple[Configuration, bytes]]) -> list[Graph]:
    """Return the graphs; equal graphs are one object, so that work on them is shared."""
    made: dict[tuple[bytes, int], Graph] = {}
    for c, template in pool:
        if (template, c.batch_size) not in made:
            made[template, c.batch_size] = GraphTemplate.from_bytes(template).at(c.batch_size)
    return [made[template, c.batch_size] for c, template in pool]
