"""Errors of tensor, pipeline and data parallel steps on A100s (docs/research/step_time.md).

Labels of one node: vTrain's runs of Megatron-DeepSpeed (MIT), GPT models of eight sizes in 16 bits.
A hash of the sizes puts half of the models into the part that forms and `LAUNCH_US` were chosen on;
the other half judges them. The source's configurations name checkpointing, but its times agree with
steps without it. Labels of several nodes: bigscience's runs of Megatron-DeepSpeed (Apache-2.0), on
which nothing was chosen. Steps are predicted as users ask for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from research.data import data_folder
from trappm.extensions.parallel.schedules import Parallelism, ShardingStrategy
from trappm.extensions.parallel.shared_step import SharedStep

COLUMNS = [
    "gpus", "global_batch", "batch", "hidden", "heads", "layers", "tokens", "tensor", "data",
    "pipeline", "step_ms",
]  # fmt: skip
GPUS_PER_NODE = 8
TRIED_US = (50.0, 55.0, 60.0, 65.0, 70.0, 75.0, 80.0)


def read_steps(data: Path) -> pd.DataFrame:
    """Return the runs with their kind of parallelism and their part, `look` or `judge`."""
    steps = pd.read_csv(data / "new" / "vtrain_a100_megatron_single.csv.gz")
    steps.columns = pd.Index(COLUMNS)
    kinds = {name: steps[name] > 1 for name in ("data", "tensor", "pipeline")}
    models = sorted(
        set(zip(steps.hidden, steps.layers, strict=True)),
        key=lambda sizes: hashlib.sha256("{}-{}".format(*sizes).encode()).hexdigest(),
    )
    looked = set(models[: len(models) // 2])
    return steps.assign(
        passes=steps.global_batch // (steps.batch * steps.data),
        kind=[
            " x ".join(name for name, is_used in zip(kinds, row, strict=True) if is_used)
            for row in zip(*kinds.values(), strict=True)
        ],
        part=[
            "look" if sizes in looked else "judge"
            for sizes in zip(steps.hidden, steps.layers, strict=True)
        ],
    )


def read_nodes(data: Path) -> pd.DataFrame:
    """Return bigscience's runs on A100s, each layout once."""
    sheet = pd.read_csv(data / "nodes" / "llm_training.csv")
    sheet = sheet[sheet.source.str.startswith("bigscience") & (sheet.device == "A100-80GB")]
    names = {
        "n_gpus": "gpus", "micro_batch": "batch", "seq_len": "tokens", "tp": "tensor",
        "dp": "data", "pp": "pipeline",
    }  # fmt: skip
    steps = sheet[sheet.suspect.isna()].rename(columns=names).assign(part="several nodes")
    steps = steps.dropna(subset=[*names.values(), "hidden", "layers", "heads", "step_s"])
    layout = [*names.values(), "hidden", "layers", "heads", "global_batch"]
    return (
        steps.groupby(layout, as_index=False)
        .agg({"step_s": "median", "part": "first"})
        .assign(
            kind="data x tensor x pipeline",
            step_ms=lambda rows: 1000 * rows.step_s,
            passes=lambda rows: rows.global_batch // (rows.batch * rows["data"]),
        )
    )


def prepared(
    rows: pd.DataFrame, device: str, options: str
) -> Iterable[tuple[SharedStep, pd.DataFrame]]:
    """Yield the step of one GPU and its rows for each model and micro-batch."""
    with TemporaryDirectory() as folder:
        keys = ["hidden", "layers", "heads", "tokens", "batch"]
        for (hidden, layers, heads, tokens, batch), group in rows.groupby(keys):
            file = Path(folder) / f"gpt-{hidden}-{layers}.json"
            configuration = {
                "model_type": "gpt2", "n_embd": int(hidden), "n_layer": int(layers),
                "n_head": int(heads), "vocab_size": 50_257, "n_positions": int(tokens),
            }  # fmt: skip
            file.write_text(json.dumps(configuration))
            settings: dict[str, Any] = {"precision": "bf16", "optimizer": "adamw"}
            yield (
                SharedStep.of(
                    f"hf:{file}{options}",
                    device,
                    batch_size=int(batch),
                    sequence_length=int(tokens),
                    **settings,
                ),
                group,
            )


def predicted(steps: Iterable[tuple[SharedStep, pd.DataFrame]]) -> pd.DataFrame:
    """Return the rows with the predicted time in ms and the bounds of its interval."""
    parts = []
    for step, rows in steps:
        answers = [
            step.on(
                Parallelism(
                    strategy=ShardingStrategy.TP
                    if row.tensor * row.pipeline > 1
                    else ShardingStrategy.DDP,
                    gpus=min(int(row.gpus), GPUS_PER_NODE),
                    nodes=max(int(row.gpus) // GPUS_PER_NODE, 1),
                    accumulation=int(row.passes),
                    tensor=int(row.tensor) if row.tensor * row.pipeline > 1 else None,
                    pipeline=int(row.pipeline),
                )
            )
            for row in rows.itertuples(index=False)
        ]
        bounds = np.array([answer.intervals["step_time_ms"] for answer in answers])
        parts.append(
            rows.assign(
                predicted=[answer.step_time_ms for answer in answers],
                low=bounds[:, 0],
                high=bounds[:, 1],
            )
        )
    return pd.concat(parts)


def error_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the errors in percent and Kendall's tau by part and kind of parallelism."""
    lines = {}
    groups = [*rows.groupby(["part", "kind"]), *(((p, "all"), g) for p, g in rows.groupby("part"))]
    for name, group in groups:
        errors = 100 * (group.predicted / group.step_ms - 1)
        lines[name] = {
            "steps": len(group),
            "mean": round(errors.abs().mean(), 1),
            "median": round(errors.abs().median(), 1),
            "bias": round(errors.mean(), 1),
            "tau": round(group.step_ms.corr(group.predicted, "kendall"), 2),
            "within interval": round(100 * group.step_ms.between(group.low, group.high).mean()),
        }
    return pd.DataFrame(lines.values(), index=pd.MultiIndex.from_tuples(lines))


def with_launches(step: SharedStep, launch_us: float) -> SharedStep:
    """Return a step with another host time per kernel."""
    assert step.divided is not None
    return replace(step, divided=replace(step.divided, launch_us=launch_us))


def fitted_launch_us(steps: Sequence[tuple[SharedStep, pd.DataFrame]]) -> float:
    """Return the host time per kernel with the least mean error of the logarithm."""
    errors = []
    for tried in TRIED_US:
        rows = predicted((with_launches(step, tried), part) for step, part in steps)
        errors.append(float(np.abs(np.log(rows.predicted / rows.step_ms)).mean()))
    return TRIED_US[int(np.argmin(errors))]


def main(
    device: Annotated[str, typer.Option(help="Card of the node.")] = "a100-40gb",
    options: Annotated[str, typer.Option(help="Options of the models' names.")] = ",megatron",
    several_nodes: Annotated[
        bool, typer.Option("--several-nodes", help="Judge steps on several nodes.")
    ] = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="Print the constant of the part look.")
    ] = False,
) -> None:
    """Print the errors on published steps of Megatron-DeepSpeed."""
    rows = read_steps(data_folder())
    if fit:
        looked = list(prepared(rows[rows.part == "look"], device, options))
        print("LAUNCH_US", fitted_launch_us(looked))
        return
    if several_nodes:
        steps = prepared(read_nodes(data_folder()), "a100-80gb", f",checkpointing{options}")
    else:
        steps = prepared(rows, device, options)
    print(error_table(predicted(steps)).to_string())
