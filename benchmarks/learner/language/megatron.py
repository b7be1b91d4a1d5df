"""Memory a GPU of bigscience's runs of Megatron and DeepSpeed: tensor and pipeline parallel, ZeRO.

    states        2 bytes a parameter, 2 of its gradient, 4 where gradients are summed in fp32;
                  divided by ZeRO's first stage: main copy, two moments, the gradient in fp32: 16
    activations   Korthikanti et al. 2022; with checkpoints, inputs of layers, each pass under way
    memory        states + activations * fragments + process

Two constants for a machine are learned: fragments, and what a process takes with its buckets and
NCCL's rings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.learner.language.rows import Judged, Row, held_out, number, whole

GIGA = 1e9
VOCABULARIES = {"chronicles-prequel": 250_880}
"""BLOOM's; all other runs had GPT-2's."""
GPT_2_VOCABULARY = 50_304
SIZES = {
    "GPT 18B": (6144, 40), "GPT 24B": (8192, 30), "GPT 25B": (8192, 31), "GPT 30B": (6144, 64),
    "GPT 39B": (8192, 48), "GPT 52B": (8192, 64), "GPT 183B": (14400, 72), "GPT 191B": (14400, 77),
    "GPT 194B": (14400, 78), "GPT 195B": (14400, 78), "GPT 200B": (14400, 80),
}  # fmt: skip
"""Width and layers where the sheet has none: 12 x layers x width^2 makes the nominal size."""
HEAD_WIDTH = 128
"""Where heads are not told."""
SCORE_BYTES = 6
"""Of a logit on a rank that has all stages: 16 bits, and its softmax in 32."""
LAST_SCORE_BYTES = 10
"""With the gradient in 32 bits."""
CAPACITY_GB = {"A100-80GB": 85.2, "V100-32GB": 34.1, "V100-16GB": 16.9}
FRAGMENTS, PROCESS_GB = (1.1, 0.1), (4.0, 3.0)
"""Mean and deviation before any row: round numbers."""
SCATTER = 0.06
"""Of a row's relative error."""
WRONG_WIDTH = "104B"
"""Its runs had another feed-forward than the sheet's shape, the source says."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a rank of a run keeps, in GB."""

    row: Row
    states: float
    first: float
    """Activations of the first stage, whose memory is published."""
    last: float
    """Activations and logits of the last stage."""

    @property
    def machine(self) -> str:
        return self.row["device"][:4]


def run_of(row: Row) -> Run | None:
    """None where the sheet says too little: no shape, no tensor parallelism, or offloading."""
    hidden, layers = number(row, "hidden"), number(row, "layers")
    if not (hidden and layers):
        hidden, layers = SIZES.get(row["model"], (None, None))
    tensor, batch = number(row, "tp"), number(row, "micro_batch")
    if not (hidden and layers and tensor and batch) or "offload" in row["sharding"]:
        return None
    stages = number(row, "pp") or 1.0
    replicas = number(row, "dp") or whole(row, "n_gpus") / tensor / stages
    heads = number(row, "heads") or hidden / HEAD_WIDTH
    length = whole(row, "seq_len")
    vocabulary = next(
        (size for name, size in VOCABULARIES.items() if name in row["source_path"]),
        GPT_2_VOCABULARY,
    )
    passes = number(row, "grad_accum") or (number(row, "global_batch") or 0) / replicas / batch
    tokens = length * batch
    layer = tokens * hidden * (10 + 24 / tensor + 5 * heads * length / hidden / tensor)
    checkpoints = row["act_ckpt"] != "False"
    each = layers / stages * (2 * tokens * hidden if checkpoints else layer)
    working = layer if checkpoints else 0.0
    scores = tokens * vocabulary / tensor
    parameters = (12 * layers / stages * hidden**2 + vocabulary * hidden) / tensor
    alone = SCORE_BYTES * scores if stages == 1 else 0.0
    return Run(
        row=row,
        states=parameters * state_bytes(row, replicas) / GIGA,
        first=(each * min(stages, max(passes, 1.0)) + working + alone) / GIGA,
        last=(each + working + LAST_SCORE_BYTES * scores) / GIGA,
    )


def state_bytes(row: Row, replicas: float) -> float:
    """Of a parameter on a rank."""
    sums_in_full = row["precision"] == "bf16" or row["device"].startswith("V100")
    divided = 16.0
    if row["sharding"] == "8-bit optimizer":
        divided = 4.0 + 4.0 + 2.0
    if row["sharding"] in ("ZeRO-0", "Megatron-LM", "8-bit optimizer"):
        replicas = 1.0
    return 4.0 + 4.0 * sums_in_full + divided / replicas


def fit(runs: Sequence[Run]) -> dict[str, tuple[float, float]]:
    """Fragments and GB of a process on each machine; least squares of relative errors."""
    constants = {}
    for machine in dict.fromkeys(run.machine for run in runs):
        chosen = [r for r in runs if r.machine == machine and r.row["mem_gb"]]
        measured = np.array([float(r.row["mem_gb"]) for r in chosen])
        terms = np.array([[r.first, 1.0] for r in chosen]) / measured[:, None]
        rest = 1 - np.array([r.states for r in chosen]) / measured
        widths = np.diag([SCATTER / FRAGMENTS[1], SCATTER / PROCESS_GB[1]])
        before = widths @ [FRAGMENTS[0], PROCESS_GB[0]]
        terms, rest = np.vstack([terms, widths]), np.append(rest, before)
        fragments, process = np.linalg.lstsq(terms, rest, rcond=None)[0]
        constants[machine] = float(fragments), float(process)
    return constants


def judged(rows: Sequence[Row]) -> Iterator[Judged]:
    """Rows with memory, and those that ran out of it."""
    known = [
        run
        for row in rows
        if (row["mem_gb"] or row["status"] == "oom")
        and WRONG_WIDTH not in row["model"]
        and (run := run_of(row))
    ]

    def predictor(others: Sequence[Run]):  # type: ignore[no-untyped-def]
        constants = fit(others)

        def predict(run: Run) -> float:
            fragments, process = constants.get(run.machine, (FRAGMENTS[0], PROCESS_GB[0]))
            return run.states + fragments * run.first + process

        return predict

    predicted = held_out(known, lambda run: run.row["model"], predictor)
    for run, memory in zip(known, predicted, strict=True):
        row = run.row
        yield Judged(
            group=f"bigscience, {run.machine}",
            model=row["model"],
            what=f"dp {row['dp']} tp {row['tp']} pp {row['pp']} b {row['micro_batch']} "
            f"{row['precision']} {row['source_line']}",
            measured=number(row, "mem_gb"),
            predicted=memory,
            fullest=None if run.machine == "A100" else memory + max(run.last - run.first, 0.0),
            capacity=CAPACITY_GB[row["device"]],
        )
