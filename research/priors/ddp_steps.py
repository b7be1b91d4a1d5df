"""Steps of DDP on 2 to 16 GPUs, predicted from those of one GPU.

    PYTHONPATH=. python research/studies/many_gpus/steps.py ../shared/data

T4 nodes (AdaptDL): constants of sockets and PCIe are fitted on one half of the placements and
judged on the other, then fitted on two applications and judged on the third. Uneven placements are
taken for even ones with as many nodes. A100 and V100 nodes (DeepLearningExamples): the step of one
GPU is that of the same setting; how much ranks scatter (`schedules.SCATTER`) is fitted on one card
and judged on the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from trappm.extensions.parallel import schedules
from trappm.extensions.parallel.links import Node, node_of
from trappm.extensions.parallel.schedules import schedule
from trappm.extensions.parallel.step_work import even_work
from trappm.extensions.parallel.strategy import Parallelism

Array = npt.NDArray[np.float64]
FITTED = ("latency_us", "hop_us", "efficiency", "pair_share")
STIFFNESS = 0.2
"""Weight of where a constant begins, against one step."""
MOST_FITTED = 300
"""Steps that constants are fitted to, drawn evenly."""
MILLIONS = {
    "imagenet": 25.6, "bert": 108.9, "yolov3": 61.9,
    "BART": 406.0, "Transformer": 210.0, "MaskRCNN": 44.4, "Jasper": 333.0, "QuartzNet": 18.9,
    "Efficientdet": 3.9,
}  # fmt: skip
"""Parameters of ResNet-50, BERT base, YOLOv3 and so on, rounded, by their papers; the sheets have
none. Models of which none is known for sure are left out."""
SETTING = [
    "model", "device", "system", "precision", "memory_format", "per_gpu_micro_batch",
    "accumulation_steps", "img_size", "seq_len", "extra",
]  # fmt: skip


def predicted_ms(rows: pd.DataFrame, node: Node) -> Array:
    """Steps of DDP, from `alone_ms`, that of one GPU."""
    columns = rows[["model", "alone_ms", "n_gpus", "n_nodes", "passes"]]
    times = []
    for model, alone_ms, gpus, nodes, passes in columns.itertuples(index=False):
        work = even_work(alone_ms / passes, 4e6 * MILLIONS[model])
        parallelism = Parallelism(gpus=-(-gpus // nodes), nodes=nodes, accumulation=passes)
        alone = schedule(work, Parallelism(accumulation=passes), node).step_ms
        times.append(schedule(work, parallelism, node).step_ms * alone_ms / alone)
    return np.array(times)


def fitted_node(rows: pd.DataFrame) -> Node:
    """The node of T4s, its links as these steps say."""
    start = node_of("t4")
    chosen = rows.sample(min(len(rows), MOST_FITTED), random_state=0)

    def moved(logs: Array) -> Node:
        factors = dict(zip([*FITTED, "inner"], np.exp(logs), strict=True))
        network = {name: getattr(start.network, name) * factors[name] for name in FITTED}
        inner = replace(start.inner, efficiency=start.inner.efficiency * factors["inner"])
        return replace(start, inner=inner, network=replace(start.network, **network))

    def residuals(logs: Array) -> Array:
        errors = np.log(predicted_ms(chosen, moved(logs)) / chosen.step_ms.to_numpy())
        return np.concatenate([errors, STIFFNESS * logs])

    start_logs = np.zeros(len(FITTED) + 1)
    return moved(least_squares(residuals, start_logs, loss="soft_l1", max_nfev=15).x)


def t4_steps(path: Path) -> pd.DataFrame:
    """Of 2 to 16 GPUs, with the step of one at the same batch; known sizes of gradients only."""
    sheet = pd.read_csv(path).rename(columns={"application": "model"})
    sheet = sheet[(sheet.table == "placements") & sheet.model.isin(list(MILLIONS))]
    keys = ["model", "local_batch"]
    alone = sheet[sheet.n_gpus == 1].groupby(keys, as_index=False).step_ms.median()
    rows = sheet[sheet.n_gpus.between(2, 16)].merge(
        alone.rename(columns={"step_ms": "alone_ms"}), on=keys
    )
    return rows.assign(passes=1)


def node_steps(path: Path) -> pd.DataFrame:
    """Of 2 to 16 A100s or V100s, with the step of one in the same setting."""
    sheet = pd.read_csv(path)
    # Where batch and throughput count different things, no step follows from them.
    sheet = sheet[sheet.suspect.isna() & sheet.micro_step_ms_derived.notna()]
    sheet = sheet[sheet.model.isin(list(MILLIONS))]
    alone = sheet[sheet.n_gpus == 1].groupby(SETTING, as_index=False, dropna=False)
    alone = alone.throughput_per_s.median().rename(columns={"throughput_per_s": "alone_per_s"})
    rows = sheet[sheet.n_gpus.between(2, 16)].merge(alone, on=SETTING)
    passes = rows.accumulation_steps.fillna(1).clip(lower=1).astype(int)
    samples = rows.per_gpu_micro_batch * passes
    return rows.assign(
        passes=passes,
        alone_ms=1000 * samples / rows.alone_per_s,
        step_ms=1000 * samples * rows.n_gpus / rows.throughput_per_s,
    ).dropna(subset=["alone_ms", "step_ms"])


def line(name: str, rows: pd.DataFrame, times_ms: Sequence[float] | Array) -> str:
    """Mean and median errors, and those of GPUs that communicate in no time."""
    errors = 100 * np.abs(np.asarray(times_ms) / rows.step_ms.to_numpy() - 1)
    free = 100 * np.abs(rows.alone_ms / rows.step_ms - 1)
    within = 100 * (errors <= 10).mean()
    return (
        f"{name:34} {len(rows):5} {errors.mean():7.1f} {np.median(errors):7.1f} "
        f"{within:9.0f} {free.mean():8.1f}"
    )


def judge_t4(rows: pd.DataFrame) -> None:
    """By placements held out, and by applications held out."""
    print(line("T4, as shipped", rows, predicted_ms(rows, node_of("t4"))))
    with mock.patch.object(schedules, "SCATTER", 0.0):
        print(line("T4, ranks alike", rows, predicted_ms(rows, node_of("t4"))))
    placements = np.random.default_rng(0).permutation(rows.placement.unique())
    half = rows.placement.isin(placements[::2])
    parts = []
    for learned, judged in ((half, ~half), (~half, half)):
        times_ms = predicted_ms(rows[judged], fitted_node(rows[learned]))
        parts.append(rows[judged].assign(predicted=times_ms))
    held = pd.concat(parts)
    print(line("T4, placements held out", held, held.predicted))
    for name, part in held.groupby("model"):
        print(line(f"  {name}", part, part.predicted))
    for name, part in held.groupby(held.n_nodes > 1):
        print(line("  between nodes" if name else "  within a node", part, part.predicted))
    parts = []
    for model in rows.model.unique():
        own = rows.model == model
        parts.append(rows[own].assign(predicted=predicted_ms(rows[own], fitted_node(rows[~own]))))
    held = pd.concat(parts)
    print(line("T4, applications held out", held, held.predicted))
    for name, part in held.groupby("model"):
        print(line(f"  {name}", part, part.predicted))


def with_scatter(rows: pd.DataFrame, scatter: float) -> Array:
    """Steps where ranks scatter by so much, by the schedule of each."""
    with mock.patch.object(schedules, "SCATTER", scatter):
        times = np.zeros(len(rows))
        for card in rows.card.unique():
            own = (rows.card == card).to_numpy()
            times[own] = predicted_ms(rows[own], node_of(card.lower()))
    return times


def judge_scatter(rows: pd.DataFrame) -> None:
    """Fitted on one card, judged on the other."""
    tried = np.linspace(0.0, 0.15, 31)
    for card in ("A100", "V100"):
        own, other = rows[rows.card == card], rows[rows.card != card]
        misses = [np.abs(with_scatter(own, s) / own.step_ms - 1).mean() for s in tried]
        best = float(tried[int(np.argmin(misses))])
        name = f"{other.card.iloc[0]}, scatter of {card}s ({best:.3f})"
        print(line(name, other, with_scatter(other, best)))


def judge_nodes(rows: pd.DataFrame) -> None:
    """By device, then by number of GPUs and by model."""
    keys = rows.device.str.slice(0, 4).str.lower()
    times_ms = np.zeros(len(rows))
    for key in keys.unique():
        times_ms[keys == key] = predicted_ms(rows[keys == key], node_of(key))
    rows = rows.assign(predicted=times_ms, card=keys.str.upper(), count=rows.n_gpus)
    for group, part in rows.groupby("card"):
        print(line(f"{group}, as shipped", part, part.predicted))
    judge_scatter(rows)
    for card in ("A100", "V100"):
        own = rows[rows.card == card]
        print(line(f"{card}, ranks alike", own, with_scatter(own, 0.0)))
    for count, part in rows.groupby("count"):
        print(line(f"  {count} GPUs", part, part.predicted))
    for name, part in rows.groupby("model"):
        print(line(f"  {name}", part, part.predicted))


def main() -> None:
    parser = argparse.ArgumentParser(description="Judges steps of DDP on many GPUs.")
    parser.add_argument("data", type=Path, help="the folder of labels, with nodes/ in it")
    nodes = parser.parse_args().data / "nodes"
    print(
        f"{'errors, %':34} {'steps':>5} {'mean':>7} {'median':>7} {'within 10':>9} {'no comm.':>8}"
    )
    judge_nodes(node_steps(nodes / "dle_train_throughput.csv"))
    judge_t4(t4_steps(nodes / "adaptdl_ddp_steps_t4.csv"))


if __name__ == "__main__":
    main()
