"""FSDP, tensor and pipeline parallel: time and memory of a rank, on published runs.

    PYTHONPATH=. python benchmarks/learner/parallel/language_models.py ../shared/data

Time (llm-foundry, FSDP on 8 to 512 GPUs): runs of a model with the same batch, length and settings
on several numbers of GPUs. How long a rank computes is taken from the fewest GPUs, and the step on
all others is predicted; no constant is fitted. Memory of a rank: bigscience's tensor and pipeline
parallel runs, two constants a machine (`megatron.fit`), models held out. litgpt's runs under FSDP
are left out: they checkpoint activations, which those on one GPU do not.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from benchmarks.learner.language import megatron
from benchmarks.learner.language.pretraining import DEVICES, NODE
from benchmarks.learner.language.rows import Judged, Row, held_out, number, read_rows, whole
from benchmarks.learner.language.rows import summary as table
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.parallel.links import node_of
from trappm.learner.physics.parallel.rank_memory import MemoryNeeds, rank_memory
from trappm.learner.physics.parallel.schedules import schedule
from trappm.learner.physics.parallel.step_work import Gradient, StepWork
from trappm.learner.physics.parallel.strategy import Parallelism, Strategy

GIGA = 1e9
HALF_BYTES = 2
"""Of a parameter that is gathered, and of a gradient that is reduced."""
FAMILY = ("model", "device", "seq_len", "precision", "micro_batch", "act_ckpt", "sharding")
LONGEST_MS = 1e6
UPDATE_BYTES = 40.0
"""Read and written for each parameter of a rank's share by an optimizer of plain operators."""


def parameters_of(row: Row) -> tuple[float, float]:
    """Of a block, and of the embeddings, which are the head as well."""
    hidden = whole(row, "hidden")
    return 12.0 * hidden**2, float(whole(row, "vocab") * hidden)


def work_of(row: Row, pass_ms: float) -> StepWork:
    """A pass of so many ms, evenly spread over the blocks."""
    block, root = parameters_of(row)
    layers = whole(row, "layers")
    total = layers * block + root
    moved = spec_of(DEVICES[row["device"]]).bandwidth_gbs * 1e6
    forward = 1 / 4 if row["act_ckpt"] == "True" else 1 / 3  # it is computed once more
    return StepWork(
        forward_ms=pass_ms * forward,
        backward_ms=pass_ms * (1 - forward),
        update_ms=UPDATE_BYTES * total / moved,
        copy_ms=2 * HALF_BYTES * total / moved,
        gradients=tuple(Gradient(HALF_BYTES * block, (n + 1) / layers) for n in range(layers)),
        blocks_bytes=(HALF_BYTES * block,) * layers,
        root_bytes=HALF_BYTES * root,
    )


def step_ms(row: Row, pass_ms: float) -> float:
    gpus = whole(row, "n_gpus")
    parallelism = Parallelism(
        strategy=Strategy.FSDP,
        gpus=min(gpus, NODE),
        nodes=max(gpus // NODE, 1),
        accumulation=whole(row, "grad_accum", 1),
        reshard=row["sharding"] == "FULL_SHARD",
    )
    return schedule(work_of(row, pass_ms), parallelism, node_of(DEVICES[row["device"]])).step_ms


def scaled(rows: Sequence[Row]) -> Iterator[Judged]:
    """Steps on more GPUs than the fewest of the same run; and where nothing but passes counted."""
    families = defaultdict(list)
    for row in rows:
        if row["status"] == "ok" and row["precision"] != "amp_fp8":
            families[tuple(row[name] for name in FAMILY)].append(row)
    for family in families.values():
        fewest, *others = sorted(family, key=lambda row: whole(row, "n_gpus"))
        measured = 1000 * float(fewest["step_s"])

        def miss(pass_ms: float, row: Row = fewest, measured: float = measured) -> float:
            return step_ms(row, pass_ms) - measured

        if not others or miss(1e-3) > 0:  # nothing is left for the passes
            continue
        pass_ms = brentq(miss, 1e-3, LONGEST_MS)
        for row in others:
            passes = whole(row, "grad_accum", 1) / whole(fewest, "grad_accum", 1)
            for how, predicted in (
                ("scheduled", step_ms(row, pass_ms)),
                ("as many times as fast", measured * passes),
            ):
                yield Judged(
                    group=f"{row['device'][:4]} {how}",
                    model=row["model"],
                    what=f"{fewest['n_gpus']} -> {row['n_gpus']} GPUs, {row['sharding']}",
                    measured=float(row["step_s"]),
                    predicted=predicted / 1000,
                )


def megatron_gb(run: megatron.Run) -> tuple[float, float]:
    """Of a rank of the first stage: states with parameters and gradients, and activations."""
    row = run.row
    hidden, layers = number(row, "hidden"), number(row, "layers")
    if not (hidden and layers):
        hidden, layers = megatron.SIZES[row["model"]]
    tensor, stages = whole(row, "tp", 1), max(whole(row, "pp"), 1)
    replicas = whole(row, "dp") or max(round(whole(row, "n_gpus") / tensor / stages), 1)
    length, batch = whole(row, "seq_len"), whole(row, "micro_batch")
    vocabulary = next(
        (n for name, n in megatron.VOCABULARIES.items() if name in row["source_path"]),
        megatron.GPT_2_VOCABULARY,
    )
    block, root = 12.0 * hidden**2, vocabulary * hidden
    total = layers * block + root
    tokens, heads = length * batch, number(row, "heads") or hidden / megatron.HEAD_WIDTH
    layer = tokens * hidden * (34 + 5 * heads * length / hidden)  # Korthikanti et al. 2022
    checkpoints = row["act_ckpt"] != "False"
    passes = number(row, "grad_accum") or (number(row, "global_batch") or 0) / replicas / batch
    sums = 4.0 if row["precision"] == "bf16" or row["device"].startswith("V100") else 0.0
    shards = row["sharding"] not in ("ZeRO-0", "Megatron-LM", "8-bit optimizer")
    needs = MemoryNeeds(
        parameters=HALF_BYTES * total,
        states=(10.0 if row["sharding"] == "8-bit optimizer" else 16.0) * total,
        gradients=np.array([(HALF_BYTES + sums) * total]),
        activations=np.array([layers * (2 * tokens * hidden if checkpoints else layer)]),
        all_gradients=(HALF_BYTES + sums) * total,
        blocks=[HALF_BYTES * block] * int(layers),
        root=HALF_BYTES * root,
        divided=0.0 if checkpoints else MemoryNeeds.divided,
    )
    # Ranks of a group lie within a node, whatever its size.
    parallelism = Parallelism(
        gpus=tensor,
        nodes=replicas * stages,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        accumulation=max(round(passes), 1),
        shard_states=shards,
        gradient_views=True,
    )
    rank = rank_memory(needs, parallelism)
    scores = megatron.SCORE_BYTES * tokens * vocabulary / tensor if stages == 1 else 0.0
    working = tokens * hidden * (10 + 24 / tensor + 5 * heads * length / hidden / tensor)
    once = (working if checkpoints else 0.0) + scores
    kept = rank.parameters + rank.states + rank.gradients
    return kept / GIGA, (rank.activations + once) / GIGA


def shared_memory(rows: Sequence[Row]) -> Iterator[Judged]:
    """bigscience: models held out, as in `benchmarks/learner/language/megatron.py`."""
    runs = [
        run
        for row in rows
        if row["mem_gb"] and megatron.WRONG_WIDTH not in row["model"]
        if (run := megatron.run_of(row))
    ]
    shares = {id(run): megatron_gb(run) for run in runs}
    ours = [
        megatron.Run(row=run.row, states=shares[id(run)][0], first=shares[id(run)][1], last=0.0)
        for run in runs
    ]

    def predictor(others: Sequence[megatron.Run]):  # type: ignore[no-untyped-def]
        constants = megatron.fit(others)
        usual = megatron.FRAGMENTS[0], megatron.PROCESS_GB[0]

        def predict(run: megatron.Run) -> float:
            fragments, process = constants.get(run.machine, usual)
            return run.states + fragments * run.first + process

        return predict

    predicted = held_out(ours, lambda run: run.row["model"], predictor)
    for run, memory_gb in zip(ours, predicted, strict=True):
        row = run.row
        yield Judged(
            group=f"bigscience {run.machine}, TP x PP",
            model=row["model"],
            what=f"dp {row['dp']} tp {row['tp']} pp {row['pp']} {row['sharding']}",
            measured=number(row, "mem_gb"),
            predicted=memory_gb,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder of labels, with nodes/ in it")
    parser.add_argument("--details", action="store_true", help="a line a row")
    options = parser.parse_args()
    path = options.data / "nodes" / "llm_training.csv"
    for judge, source in (
        (scaled, "llm-foundry"),
        (shared_memory, "bigscience"),
    ):
        rows = list(judge(read_rows(path, source)))
        if options.details:
            for row in rows:
                print(
                    f"{row.group:26} {row.model:18} {row.what:44} "
                    f"{row.measured:8.4g} {row.predicted:8.4g} {100 * row.error:+6.1f} %"
                )
        print(table(rows))


if __name__ == "__main__":
    main()
