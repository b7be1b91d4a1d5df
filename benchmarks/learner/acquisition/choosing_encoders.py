"""Which encoder's embeddings choose best: the autoencoder's, GraphMAE's, a random one's.

    PYTHONPATH=. python benchmarks/learner/acquisition/choosing_encoders.py LABELS.csv
        [--metric step-time] [--strategies facility,ours] [--learner quick] [--seeds 20]
        [--first-seed 3000] [--budget N]

Campaigns are replayed as by `trappm campaign replay`, with the embeddings of one encoder after the
other, and compared with a uniform draw on the same splits: the area under the curve of errors over
the logarithm of labels, its standard error corrected for splits that overlap.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trappm.experiments.label_files import read_labels
from trappm.experiments.replays import ENCODER_SEED, QUICK
from trappm.experiments.workbench import opened_workbench
from trappm.learner.bench.replay import BUDGETS, Bench, replay
from trappm.learner.estimators import OF_PHYSICS
from trappm.learner.networks.presets import LAPTOP, EncoderPreset
from trappm.learner.physics.starting_prior import prior_on_card
from trappm.terminal.replay_tables import area, standard_error

Array = npt.NDArray[np.float64]
COLUMNS = {"step-time": "step_time_ms", "memory": "memory_mib"}
UNIFORM = "random"


def encoders() -> Mapping[str, tuple[EncoderPreset, bool]]:
    """A preset, and whether it is pre-trained, by name; GraphMAE's decoder is one layer more."""
    plain = LAPTOP.encoder
    masked = replace(plain, masked=True, widths=plain.widths[:-1])
    return {
        "autoencoder": (plain, True),
        "GraphMAE": (masked, True),
        "no training": (plain, False),
    }


def benches(labels: Path, metric: str, learner: str) -> dict[str, Bench]:
    """The same labels and learner, seen through each encoder."""
    with opened_workbench(
        metric, processes=1, encoder_seed=ENCODER_SEED, watch=lambda done, total, what: None
    ) as workbench:
        prepared = workbench.prepared(read_labels(labels))
        samples = prepared.samples
        kernels = all(w.kernels is not None for w in samples.workloads)
        bench = Bench(
            samples=samples,
            embeddings=np.zeros((len(samples), 1), dtype=np.float32),
            prior=prior_on_card(metric, prepared.card, kernels=kernels),
            estimator=None if learner == QUICK else workbench.estimator(learner, prepared),
            knows_physics=learner == QUICK or learner in OF_PHYSICS,
            times=metric == "step_time_ms",
        )
        graphs = [w.graph for w in samples.workloads]
        return {
            name: replace(
                bench,
                embeddings=workbench.encoder(samples, preset, pretrained=trained).embed(graphs),
            )
            for name, (preset, trained) in encoders().items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--metric", choices=COLUMNS, default="step-time")
    parser.add_argument("--strategies", default="facility,ours")
    parser.add_argument("--learner", default=QUICK)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=3000)
    parser.add_argument("--budget", type=int, default=BUDGETS[-1])
    chosen = parser.parse_args()
    budgets = [b for b in BUDGETS if b <= chosen.budget]
    seen = benches(chosen.labels, COLUMNS[chosen.metric], chosen.learner)
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)

    def errors(bench: Bench, strategy: str) -> Array:
        """MAPE of each campaign after each budget (seeds, budgets)."""
        return np.array(
            [[point.mape for point in replay(bench, strategy, s, budgets)] for s in seeds]
        )

    uniform = errors(next(iter(seen.values())), UNIFORM)
    print(f"{'strategy':10}{'embeddings':13}" + "".join(f"{b:>7}" for b in budgets) + "   area, %")
    print(f"{UNIFORM:10}{'':13}" + "".join(f"{e:7.2f}" for e in uniform.mean(axis=0)), flush=True)
    places = np.log(np.array(budgets, dtype=np.float64))
    for strategy in chosen.strategies.split(","):
        for name, bench in seen.items():
            own = errors(bench, strategy)
            gaps = 100 * (area(places, own) / area(places, uniform) - 1)
            row = "".join(f"{error:7.2f}" for error in own.mean(axis=0))
            print(
                f"{strategy:10}{name:13}{row}  {gaps.mean():+5.1f} ± {standard_error(gaps):.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
