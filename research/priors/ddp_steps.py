"""Errors of DDP steps on 2 to 16 GPUs, predicted from steps of one GPU
(docs/research/step_time.md).

T4 nodes (AdaptDL): constants of sockets and PCIe are fitted to one half of the placements and
judged on the other, then fitted to two applications and judged on the third. Uneven placements are
treated as even ones with the same number of nodes. A100 and V100 nodes (DeepLearningExamples): the
step of one GPU is that of the same setting; the scatter of ranks (`schedules.SCATTER`) is fitted on
one card and judged on the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from research.data import data_folder
from research.held_out import Array
from trappm.extensions.parallel import schedules
from trappm.extensions.parallel.links import NodeLinks, node_of
from trappm.extensions.parallel.schedules import Parallelism, schedule
from trappm.extensions.parallel.step_work import even_work

FITTED = ("latency_us", "hop_us", "efficiency", "pair_share")
STIFFNESS = 0.2
"""Weight of a constant's starting value against one step."""
MAX_FITTED = 300
"""Number of steps that constants are fitted to, drawn at random."""
MILLIONS = {
    "imagenet": 25.6, "bert": 108.9, "yolov3": 61.9,
    "BART": 406.0, "Transformer": 210.0, "MaskRCNN": 44.4, "Jasper": 333.0, "QuartzNet": 18.9,
    "Efficientdet": 3.9,
}  # fmt: skip
"""Parameters in millions, rounded, by the models' papers; the sheets have none. Models without a
certain number are left out."""
SETTING = [
    "model", "device", "system", "precision", "memory_format", "per_gpu_micro_batch",
    "accumulation_steps", "img_size", "seq_len", "extra",
]  # fmt: skip


def predicted_ms(rows: pd.DataFrame, node: NodeLinks) -> Array:
    """Return the DDP step times of rows from `alone_ms`, the step time of one GPU."""
    columns = rows[["model", "alone_ms", "n_gpus", "n_nodes", "passes"]]
    times = []
    for model, alone_ms, gpus, nodes, passes in columns.itertuples(index=False):
        work = even_work(alone_ms / passes, 4e6 * MILLIONS[model])
        parallelism = Parallelism(gpus=-(-gpus // nodes), nodes=nodes, accumulation=passes)
        alone = schedule(work, Parallelism(accumulation=passes), node).step_ms
        times.append(schedule(work, parallelism, node).step_ms * alone_ms / alone)
    return np.array(times)


def fitted_node(rows: pd.DataFrame) -> NodeLinks:
    """Return the node of T4s with links fitted to these steps."""
    start = node_of("t4")
    chosen = rows.sample(min(len(rows), MAX_FITTED), random_state=0)

    def moved(logs: Array) -> NodeLinks:
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
    """Return steps on 2 to 16 T4s with the step of one at the same batch, of models in MILLIONS."""
    sheet = pd.read_csv(path).rename(columns={"application": "model"})
    sheet = sheet[(sheet.table == "placements") & sheet.model.isin(list(MILLIONS))]
    keys = ["model", "local_batch"]
    alone = sheet[sheet.n_gpus == 1].groupby(keys, as_index=False).step_ms.median()
    rows = sheet[sheet.n_gpus.between(2, 16)].merge(
        alone.rename(columns={"step_ms": "alone_ms"}), on=keys
    )
    return rows.assign(passes=1)


def node_steps(path: Path) -> pd.DataFrame:
    """Return steps on 2 to 16 A100s or V100s with the step of one in the same setting."""
    sheet = pd.read_csv(path)
    # If batch and throughput count different things, they do not give a step time.
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


def with_scatter(rows: pd.DataFrame, scatter: float) -> Array:
    """Return the step times of rows by the node of their card, with this scatter of ranks."""
    with mock.patch.object(schedules, "SCATTER", scatter):
        times = np.zeros(len(rows))
        for card in rows.card.unique():
            own = (rows.card == card).to_numpy()
            times[own] = predicted_ms(rows[own], node_of(card.lower()))
    return times


def error_table(groups: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the errors of `predicted` in percent by group, and those without communication."""
    lines = {}
    for name, rows in groups.items():
        errors = 100 * (rows.predicted / rows.step_ms - 1).abs()
        lines[name] = {
            "steps": len(rows),
            "mean": round(errors.mean(), 1),
            "median": round(errors.median(), 1),
            "within 10": round(100 * (errors <= 10).mean()),
            "no comm.": round(100 * (rows.alone_ms / rows.step_ms - 1).abs().mean(), 1),
        }
    return pd.DataFrame(lines.values(), index=list(lines))


def parts_of(
    title: str, rows: pd.DataFrame, keys: Mapping[str, pd.Series]
) -> dict[str, pd.DataFrame]:
    """Return the rows under a title, then by each key under its name."""
    parts = {title: rows}
    for name, key in keys.items():
        parts |= {f"{title}, {name} {value}": part for value, part in rows.groupby(key)}
    return parts


def judge_t4(rows: pd.DataFrame) -> pd.DataFrame:
    """Return errors with shipped constants, by held-out placements and by held-out applications."""
    shipped = rows.assign(predicted=predicted_ms(rows, node_of("t4")), card="T4")

    def held_out(folds: Mapping[object, pd.Series]) -> pd.DataFrame:
        return pd.concat(
            rows[own].assign(predicted=predicted_ms(rows[own], fitted_node(rows[~own])))
            for own in folds.values()
        )

    placements = np.random.default_rng(0).permutation(rows.placement.unique())
    half = rows.placement.isin(placements[::2])
    by_placement = held_out({"second": ~half, "first": half})
    by_model = held_out({model: rows.model == model for model in rows.model.unique()})
    across = by_placement.n_nodes > 1
    return error_table(
        {
            "T4, as shipped": shipped,
            "T4, no scatter": shipped.assign(predicted=with_scatter(shipped, 0.0)),
            **parts_of(
                "T4, placements held out",
                by_placement,
                {"model": by_placement.model, "between nodes:": across},
            ),
            **parts_of("T4, applications held out", by_model, {"model": by_model.model}),
        }
    )


def judge_nodes(rows: pd.DataFrame) -> pd.DataFrame:
    """Return errors by device, with the other card's scatter, by number of GPUs and by model."""
    rows = rows.assign(card=rows.device.str.slice(0, 4).str.upper())
    rows["predicted"] = with_scatter(rows, schedules.SCATTER)
    groups = {f"{card}, as shipped": part for card, part in rows.groupby("card")}
    tried = np.linspace(0.0, 0.15, 31)
    for card in ("A100", "V100"):
        own, other = rows[rows.card == card], rows[rows.card != card]
        errors = [np.abs(with_scatter(own, s) / own.step_ms - 1).mean() for s in tried]
        best = float(tried[int(np.argmin(errors))])
        name = f"{other.card.iloc[0]}, scatter of {card}s ({best:.3f})"
        groups[name] = other.assign(predicted=with_scatter(other, best))
        groups[f"{card}, no scatter"] = own.assign(predicted=with_scatter(own, 0.0))
    groups |= parts_of("A100 and V100", rows, {"GPUs": rows.n_gpus, "model": rows.model})
    return error_table(groups)


def main() -> None:
    """Print the errors in percent."""
    nodes = data_folder() / "nodes"
    print(judge_nodes(node_steps(nodes / "dle_train_throughput.csv")).to_string())
    print(judge_t4(t4_steps(nodes / "adaptdl_ddp_steps_t4.csv")).to_string())
