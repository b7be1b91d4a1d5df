"""Step times of llm-foundry's pretraining: kernels of a traced step, and FSDP's schedule.

The module is llm-foundry's MPT with parameters in bf16 as under FSDP, flash attention and
checkpoints of whole layers. Three constants are learned per card. The same rows are then predicted
through the public API: `predict_parallel` with a GPT-2 configuration of the same shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F  # noqa: N812
from scipy.optimize import least_squares
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trappm.extensions.parallel.links import NodeLinks, node_of
from trappm.extensions.parallel.schedules import Parallelism, ShardingStrategy, schedule
from trappm.extensions.parallel.shared_step import predict_parallel
from trappm.extensions.parallel.step_work import traced_work
from trappm.extensions.transformers.model_heads import KNOWN, TransformerTimes
from trappm.learner.heads.physics_heads import known_of_others
from trappm.learner.interface import Workload
from trappm.learner.physics.step_time import Lookup, StepTimePrior, Terms, terms_of, times_of
from trappm.profiler.devices.catalogue import DeviceSpec, spec_of
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.records import Graph, Optimizer, Phase, Precision
from trappm.profiler.traced_step import Trace
from trappm.profiler.tracing.tracer import Tracer

SOURCE = "mosaicml/llm-foundry"
DEVICES = {"A100-40GB": "a100", "A100-80GB": "a100-80gb", "H100-80GB": "h100"}
GPUS_PER_NODE = 8


class AttentionTerms(nn.Module):
    """Causal attention; one projection makes queries, keys and values."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(mixed.reshape(batch, length, hidden))


class DecoderLayer(nn.Module):
    """Attention and feed-forward with their norms and residuals."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = AttentionTerms(hidden, heads)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norm_1(x)) + x
        return self.down(F.gelu(self.up(self.norm_2(x)))) + x


class Mpt(nn.Module):
    """A decoder with learned positions and tied embeddings that returns the mean loss."""

    def __init__(
        self, hidden: int, layers: int, heads: int, vocabulary: int, length: int, checkpoints: bool
    ) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.tokens, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.layers = nn.ModuleList(DecoderLayer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        # The loss is computed in a single chunk; its split and cat are kernels as well.
        (chunk,) = self.norm(x).split(tokens.shape[1], dim=1)
        scores = F.linear(chunk, self.tokens.weight).flatten(0, 1)
        targets = torch.zeros(scores.shape[0], dtype=torch.long, device=scores.device)
        return torch.cat([F.cross_entropy(scores, targets, reduction="none")]).mean()


@dataclass(frozen=True)
class Factors:
    """Learned constants of a card; see `TransformerTimes`."""

    products: float
    attention: float
    contention: float

    def times(self) -> TransformerTimes:
        return TransformerTimes(**vars(self), errors=(1.0, 1.0), basis="")


START = Factors(1.1, 1.5, 0.3)
WIDTHS = (0.3, 0.3, 1.0)
"""Widths of the Gaussian priors of the factors' logarithms."""
PLAIN = Factors(1.0, 1.0, 0.0)
BARELY = 1e-9
"""Tiny contention for labels that include the overhead of sharding."""
SCATTER = 0.04
"""Scale of the logarithm of a step time; errors beyond it count less."""


@dataclass(frozen=True, eq=False)
class FoundryRun:
    """A published row with its precomputed terms."""

    row: Any
    workload: Workload
    terms: Terms
    spec: DeviceSpec
    node: NodeLinks
    parallelism: Parallelism
    waiting_ms: float = 0.0
    """Time of a step outside its passes."""
    hidden_ms: float = 0.0
    """Time of collectives that overlap with computation."""

    @property
    def card(self) -> str:
        return DEVICES[self.row.device].split("-")[0]

    def predicted_s(self, factors: Factors) -> float:
        """Return the step time as predictions compute it."""
        prior = StepTimePrior(self.spec, self._constants(factors))
        step_ms = exp(float(prior.log_values([self.workload])[0]))
        work = replace(traced_work(self.workload, prior), contention=factors.contention)
        return schedule(work.lasting(step_ms), self.parallelism, self.node).step_ms / 1e3

    def approximate_s(self, factors: Factors) -> float:
        """Return the step time if only the passes depended on the factors."""
        passes_ms = self.parallelism.accumulation * self.passes_ms(factors)
        return (passes_ms + self.waiting_ms + factors.contention * self.hidden_ms) / 1e3

    def passes_ms(self, factors: Factors) -> float:
        """Return the time of one forward and backward pass on a fast host."""
        times = times_of(self.terms, Lookup(self._constants(factors)), self.spec)
        return float(times.device.sum() - times.optimizer.sum())

    def _constants(self, factors: Factors) -> torch.Tensor:
        return factors.times().moved(known_constants(self.card), self.spec)


@cache
def known_constants(card: str) -> torch.Tensor:
    """Return the constants that other labels imply for a card."""
    return known_of_others()[0].constants_of(card)


@cache
def traced_step(sizes: tuple[int, ...], checkpoints: bool) -> Trace:
    """Trace a training step of MPT.

    Args:
        sizes: Hidden size, layers, heads, vocabulary and sequence length.
        checkpoints: Whether the activations of layers are computed again.
    """
    length = sizes[-1]
    with torch.device("meta"):
        decoder = Mpt(*sizes, checkpoints).bfloat16()  # type: ignore[arg-type]
        tokens = torch.zeros(2, length, dtype=torch.long)
    return Tracer(decoder, ExampleInputs.of(tokens), batch_sizes=(2, 3), is_named=True).trace()


def sizes_of(row: Any) -> tuple[int, ...]:
    return tuple(map(int, (row.hidden, row.layers, row.heads, row.vocab, row.seq_len)))


def run_of(row: Any) -> FoundryRun:
    """Trace the step of a row and compute its terms."""
    step = traced_step(sizes_of(row), bool(row.act_ckpt))
    workload = Workload(
        graph=Graph.empty(int(row.micro_batch)),
        optimizer=Optimizer.ADAM,
        phase=Phase.TRAIN,
        trace=step,
        kernels=step.kernels,
    )
    gpus = int(row.n_gpus)
    parallelism = Parallelism(
        strategy=ShardingStrategy.FSDP,
        gpus=min(gpus, GPUS_PER_NODE),
        nodes=max(gpus // GPUS_PER_NODE, 1),
        accumulation=1 if np.isnan(row.grad_accum) else int(row.grad_accum),
    )
    device = DEVICES[row.device]
    spec, node = spec_of(device), node_of(device)
    run = FoundryRun(row, workload, terms_of([workload], spec), spec, node, parallelism)
    work = traced_work(workload, StepTimePrior(spec, run._constants(START)))
    shared = schedule(replace(work, contention=BARELY), parallelism, node)
    return replace(
        run,
        waiting_ms=shared.step_ms - parallelism.accumulation * run.passes_ms(START),
        hidden_ms=max(shared.communication_ms - shared.exposed_ms, 0.0),
    )


def runs_of(rows: pd.DataFrame) -> list[FoundryRun]:
    """Return the rows in bf16; no label shows the throughput of fp8."""
    chosen = rows[(rows.status == "ok") & (rows.precision != "amp_fp8")]
    return [run_of(row) for row in chosen.itertuples(index=False)]


def fit(runs: Sequence[FoundryRun]) -> dict[str, Factors]:
    """Fit the factors of each card."""
    centre, widths = np.log(astuple(START)), np.array(WIDTHS)
    factors = {}
    for card in dict.fromkeys(run.card for run in runs):
        chosen = [run for run in runs if run.card == card]

        def residuals(logs: np.ndarray, chosen: Sequence[FoundryRun] = chosen) -> np.ndarray:
            tried = Factors(*np.exp(logs).tolist())
            errors = [
                np.log(run.approximate_s(tried) / float(run.row.step_s)) / SCATTER for run in chosen
            ]
            return np.concatenate([errors, (logs - centre) / widths])

        best = least_squares(residuals, centre, loss="soft_l1").x
        factors[card] = Factors(*np.exp(best).tolist())
    return factors


Learned = Mapping[str, Factors]
"""Factors by card."""


def held_out_fits(runs: Sequence[FoundryRun]) -> dict[str, Learned]:
    """Return, for each model, the factors fitted to all other models' rows."""
    names = dict.fromkeys(run.row.model for run in runs)
    return {name: fit([run for run in runs if run.row.model != name]) for name in names}


def fitted(rows: pd.DataFrame) -> str:
    """Return the constants of all rows and the bounds of 90 % of the held-out errors."""
    runs = runs_of(rows)
    factors, others = fit(runs), held_out_fits(runs)
    lines = []
    for card, learned in factors.items():
        own = [run for run in runs if run.card == card]
        models = [run.row.model for run in own]
        ratios = [run.row.step_s / run.predicted_s(others[run.row.model][card]) for run in own]
        low, high = bounds(ratios, models)
        lines.append(f"{card}: {learned}, errors=({low:.3f}, {high:.3f})")
    return "\n".join(lines)


def bounds(ratios: Sequence[float], models: Sequence[str]) -> tuple[float, float]:
    """Return the bounds of 90 % of measured / predicted, each model with one vote."""
    order = np.argsort(ratios)
    votes = np.array([1 / models.count(model) for model in models])[order]
    levels = (np.cumsum(votes) - votes / 2) / votes.sum()
    low, high = np.interp([0.05, 0.95], levels, np.array(ratios)[order])
    return min(float(low), 1.0), max(float(high), 1.0)


Seconds = tuple[float, float, float]
"""Step time with the bounds of its interval, NaN where none is stated."""


def user_prediction(run: FoundryRun, folder: Path, learned: Learned | None = None) -> Seconds:
    """Predict a row by the public API, optionally with other constants than the shipped ones."""
    row, sizes = run.row, sizes_of(run.row)
    hidden, layers, heads, vocabulary, length = sizes
    file = folder / f"mpt-{'-'.join(map(str, sizes))}.json"
    configuration = {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads,
        "vocab_size": vocabulary, "n_positions": length, "activation_function": "gelu",
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    file.write_text(json.dumps(configuration))
    constants = {
        (card, True): replace(KNOWN[card, True], **vars(factors))
        for card, factors in (learned or {}).items()
    }
    with mock.patch.dict(KNOWN, constants):
        answer = predict_parallel(
            f"hf:{file}" + (",checkpointing" if row.act_ckpt else ""),
            device=DEVICES[row.device],
            gpus=run.parallelism.gpus,
            nodes=run.parallelism.nodes,
            accumulation=run.parallelism.accumulation,
            strategy=run.parallelism.strategy,
            batch_size=int(row.micro_batch),
            sequence_length=length,
            precision=Precision.BF16,
            optimizer="adamw",
        )
    low_ms, high_ms = answer.intervals["step_time_ms"]
    return answer.step_time_ms / 1e3, low_ms / 1e3, high_ms / 1e3


def predicted(rows: pd.DataFrame) -> pd.DataFrame:
    """Predict without language model labels, with other models' labels, and by the public API."""
    runs = runs_of(rows)
    others = held_out_fits(runs)

    def plain(run: FoundryRun, factors: Factors) -> Seconds:
        return run.predicted_s(factors), np.nan, np.nan

    with TemporaryDirectory() as name:
        folder = Path(name)
        kinds = {
            "images alone": [plain(run, PLAIN) for run in runs],
            "models held out": [plain(run, others[run.row.model][run.card]) for run in runs],
            "asked, held out": [
                user_prediction(run, folder, others[run.row.model]) for run in runs
            ],
            "asked": [user_prediction(run, folder) for run in runs],
        }
    return pd.DataFrame(
        {
            "group": f"llm-foundry {run.card}, {kind}",
            "model": run.row.model,
            "what": f"{run.row.seq_len:.0f} x {run.row.micro_batch:.0f} on "
            f"{run.row.n_gpus:.0f} {run.row.device}",
            "measured": run.row.step_s,
            "predicted": value,
            "low": low,
            "high": high,
        }
        for kind, values in kinds.items()
        for run, (value, low, high) in zip(runs, values, strict=True)
    )
