"""From labels to predictors that can learn from them: one set-up for evaluate, tune and replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from research.evaluation.benchmark import PAPER_SEEDS, Samples
from research.evaluation.labelled_workloads import Prepared, prepare
from research.peers.predictors import Surroundings, estimator_named
from trappm.cluster.profiles import StepCache
from trappm.learner.estimator import Estimator
from trappm.learner.paper.encoder import Encoder, make_encoder
from trappm.learner.paper.presets import EncoderPreset
from trappm.profiler.progress import Watch
from trappm.profiler.records import Measurement
from trappm.store import Home, Store


@dataclass(frozen=True, kw_only=True, eq=False)
class Workbench:
    """A data folder, whose store is open, and what an experiment wants of it."""

    home: Home
    store: Store
    metric: str
    """A metric's column."""
    processes: int
    """How many make profiles at once."""
    encoder_seed: int
    usable: Mapping[tuple[str, int], bool] | None
    watch: Watch

    def prepared(self, measurements: Sequence[Measurement]) -> Prepared:
        """The labels of the metric with their workloads; raises what `prepare` raises."""
        return prepare(
            measurements,
            self.metric,
            self.store,
            StepCache(self.home.step_profiles),
            processes=self.processes,
            usable=self.usable,
            watch=self.watch,
        )

    def encoder(self, samples: Samples, preset: EncoderPreset, *, pretrained: bool) -> Encoder:
        """An encoder of the samples' graphs; it needs no open store."""
        return make_encoder(
            [workload.graph for workload in samples.workloads],
            samples.architectures,
            preset,
            pretrained=pretrained,
            seed=self.encoder_seed,
            cache=self.home.path / "encoders",
            on_progress=lambda done, total: self.watch(done, total, "pre-training the encoder"),
        )

    def estimator(self, name: str, prepared: Prepared, size: str = "laptop") -> Estimator:
        """The predictor of this name for these labels; it needs no open store.

        Raises:
            InputError: there is none, or the labels lack what it needs.
        """
        given = Surroundings(
            metric=self.metric,
            card=prepared.card,
            make_encoder=lambda preset, pretrained: self.encoder(
                prepared.samples, preset, pretrained=pretrained
            ),
            estimates_mib=prepared.estimates_mib,
            size=size,
        )
        return estimator_named(name, given)


@contextmanager
def opened_workbench(
    metric: str,
    *,
    processes: int,
    watch: Watch,
    encoder_seed: int = PAPER_SEEDS[0],
    usable: Mapping[tuple[str, int], bool] | None = None,
) -> Iterator[Workbench]:
    """The workbench of the user's data folder.

    Raises:
        StoreError: the label store, which keeps the profiles, cannot be used.
    """
    home = Home.open()
    with Store.open(home.database_url) as store:
        yield Workbench(
            home=home,
            store=store,
            metric=metric,
            processes=processes,
            encoder_seed=encoder_seed,
            usable=usable,
            watch=watch,
        )
