"""How well our head predicts memory on published A100 labels.

    PYTHONPATH=. python benchmarks/learner/accuracy_memory.py ../shared/data --profiles FILE
        [--task NAME]

Profiles each architecture of the sheet into FILE, which a later call goes on with. Tasks:
`architectures` and `families` hold whole ones out, with a fifth of the rows; a number takes so many
labels, drawn uniformly, of the rest. Judged are usable rows, spikes included; for running out of
memory all that the importer takes for that beside the usable ones. Architectures without a graph
are left out and told. One line of JSON for each seed and the mean.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd

from trappm.learner.estimator import Targets
from trappm.learner.heads.metric_head import Ours
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.stats.folds import content_groups
from trappm.learner.workload import Workload
from trappm.profiler.devices.capacity import USABLE_SHARE
from trappm.profiler.models.families import family_of
from trappm.profiler.records import GraphTemplate
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.store.exchange.importers.gpumemnet import CAPACITY_MIB, verdicts

SHEET = "a100_40gb_train_memory"
HELD_OUT = 0.2
SEEDS = (1337, 1338, 1339, 1340, 1341)


def profile(architecture: str) -> dict[str, str]:
    """One line of the file of profiles."""
    import torch

    from trappm.profiler.errors import TrappmError
    from trappm.profiler.models.zoo import native_input_size
    from trappm.profiler.static_profile import static_profile

    torch.set_num_threads(1)
    try:
        made = static_profile(architecture, native_input_size(architecture) or 224)
    except TrappmError as error:
        return {"architecture": architecture, "refusal": str(error)}
    parts = {"graph": made.graph.to_bytes(), "step": made.step and made.step.to_bytes()}
    return {
        "architecture": architecture,
        **{name: base64.b85encode(data).decode() for name, data in parts.items() if data},
    }


def profiles(names: list[str], path: Path, processes: int) -> dict[str, dict[str, str]]:
    """The profiles of these architectures; what the file lacks is made and added."""
    lines = path.read_text().splitlines() if path.exists() else []
    known = {row["architecture"]: row for row in map(json.loads, lines)}
    with ProcessPoolExecutor(processes) as pool, path.open("a") as file:
        for row in pool.map(profile, [name for name in names if name not in known]):
            file.write(json.dumps(row) + "\n")
            file.flush()
            known[row["architecture"]] = row
    return known


def labels(folder: Path) -> pd.DataFrame:
    """Usable rows with their memory, and rows that ran out of it with their bound."""
    quality = pd.read_csv(folder / f"{SHEET}_quality.csv")
    taken = pd.DataFrame(
        {
            "architecture": v.measurement.configuration.architecture,
            "batch_size": v.measurement.configuration.batch_size,
            "memory_mib": v.measurement.memory_mib,
            "ran_out": v.kind == "censored",
        }
        for v in verdicts(folder / f"{SHEET}.csv")
        if v.measurement is not None
    )
    table = taken.merge(quality)
    return table[table.ran_out | (table["class"] == "usable")].reset_index(drop=True)


def workloads(table: pd.DataFrame, known: dict[str, dict[str, str]]) -> list[Workload]:
    graphs, steps = {}, {}
    for name in table.architecture.unique():
        row = {k: base64.b85decode(v) for k, v in known[name].items() if k != "architecture"}
        graphs[name] = GraphTemplate.from_bytes(row["graph"])
        steps[name] = StepProfile.from_bytes(row["step"]) if "step" in row else None
    return [
        Workload(graph=graphs[row.architecture].at(row.batch_size), step=steps[row.architecture])
        for row in table.itertuples()
    ]


def held_out(names: pd.Series, generator: np.random.Generator) -> np.ndarray:
    """Rows of architectures or families, drawn until they have a fifth of all rows."""
    share = names.value_counts(normalize=True)
    drawn = generator.permutation(sorted(share.index))
    before = np.cumsum([0.0, *share[drawn]])[:-1]
    return names.isin(drawn[before < HELD_OUT]).to_numpy()


def judge(table: pd.DataFrame, samples: list[Workload], task: str, seed: int) -> dict[str, float]:
    """Trains on what is not held out (or a draw of it), and judges on what is."""
    generator = np.random.default_rng(seed)
    twins = pd.Series(content_groups(table.architecture.tolist(), samples))
    test = held_out(table.architecture.map(family_of) if task == "families" else twins, generator)
    train = np.flatnonzero(~test)
    if task.isdigit():
        train = np.sort(generator.permutation(train)[: int(task)])
    ran_out = table.ran_out.to_numpy()
    limit = USABLE_SHARE * CAPACITY_MIB
    values = np.where(ran_out, np.nan, table.memory_mib)
    bounds = np.where(ran_out, limit, np.nan)
    started = time.perf_counter()
    head = Ours(MemoryPrior()).fit(
        [samples[i] for i in train],
        Targets(values[train], bounds[train], twins.to_numpy()[train].tolist()),
        generator,
    )
    trained_s = time.perf_counter() - started
    rows = np.flatnonzero(test & ~ran_out)
    estimate, truth = head.predict([samples[i] for i in rows]), values[rows]
    off = 100 * np.abs(estimate.median / truth - 1)
    plain = table.spike.to_numpy()[rows] == 0
    every = np.flatnonzero(test)
    warned = head.exceeding([samples[i] for i in every], limit) > 0.5
    right = np.count_nonzero(warned & ran_out[every])
    return {
        "labels": len(train),
        "mape": float(off.mean()),
        "median_ape": float(np.median(off)),
        "mape_without_spikes": float(off[plain].mean()),
        "coverage": 100 * float(np.mean((estimate.low <= truth) & (truth <= estimate.high))),
        "out_of_memory_precision": right / max(np.count_nonzero(warned), 1),
        "out_of_memory_recall": right / np.count_nonzero(ran_out[every]),
        "outside": 100 * float(estimate.outside.mean()),
        "trained_s": trained_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--profiles", type=Path, required=True, help="file to keep profiles in")
    parser.add_argument("--task", nargs="+", default=["architectures", "families", "20", "50"])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--limit", type=int, help="only so many architectures, drawn at random")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    table = labels(arguments.data)
    names = np.random.default_rng(SEEDS[0]).permutation(sorted(table.architecture.unique()))
    names = names[: arguments.limit].tolist()
    known = profiles(names, arguments.profiles, arguments.processes)
    refused = {name: known[name]["refusal"] for name in names if "refusal" in known[name]}
    print(json.dumps({"architectures": len(names), "refused": refused}), flush=True)
    table = table[table.architecture.isin(set(names) - set(refused))].reset_index(drop=True)
    samples = workloads(table, known)
    for task in arguments.task:
        results = []
        for seed in arguments.seeds:
            results.append(judge(table, samples, task, seed))
            print(json.dumps({"task": task, "seed": seed, **results[-1]}), flush=True)
        mean = pd.DataFrame(results).mean().round(3).to_dict()
        print(json.dumps({"task": task, "seed": "mean", **mean}), flush=True)


if __name__ == "__main__":
    main()
