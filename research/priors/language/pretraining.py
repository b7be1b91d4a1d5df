"""Seconds a step of llm-foundry's pretraining: kernels of a traced step, and FSDP's schedule.

The module is llm-foundry's MPT with parameters cast to bf16, as FSDP has it, flash attention and
checkpointing of whole layers. Three constants for a card's model are learned. The same rows are
then asked for as users do, by `predict_parallel` of a configuration of GPT-2 in that shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import torch
from scipy.optimize import least_squares

from research.priors.language.decoder import Decoder, Method, Shape
from research.priors.language.rows import Judged, Row, whole
from trappm.extensions.parallel.links import Node, node_of
from trappm.extensions.parallel.schedules import schedule
from trappm.extensions.parallel.shared_step import predict_parallel
from trappm.extensions.parallel.step_work import traced_work
from trappm.extensions.parallel.strategy import Parallelism, Strategy
from trappm.extensions.transformers.step_times import KNOWN, TransformerTimes
from trappm.learner.heads.other_devices import known_of_others
from trappm.learner.physics.device_specs import DeviceSpec, spec_of
from trappm.learner.physics.kernel_terms import Terms, terms_of
from trappm.learner.physics.kernel_times import Lookup, times_of
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.records import Graph, Optimizer, Phase, Precision
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.profiler.tracing.tracer import Tracer

DEVICES = {"A100-40GB": "a100", "A100-80GB": "a100-80gb", "H100-80GB": "h100"}
NODE = 8


def gpt(hidden: int, layers: int, heads: int, vocabulary: int, positions: int) -> Shape:
    """Return the shape of GPT-2 of this size, as in MPT with flash attention and GPT-3."""
    return Shape(
        hidden=hidden, layers=layers, heads=heads, feed_forward=4 * hidden, vocabulary=vocabulary,
        positions=positions, biases=True, tied=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Factors:
    """What is learned of a card's model; see `TransformerTimes`."""

    products: float
    attention: float
    contention: float

    def times(self) -> TransformerTimes:
        return TransformerTimes(**vars(self), errors=(1.0, 1.0), basis="")


START = Factors(1.1, 1.5, 0.3)
WIDTHS = (0.3, 0.3, 1.0)
"""Of Gaussian priors of the logarithms: of what a kernel reaches, and of contention."""
PLAIN = Factors(1.0, 1.0, 0.0)
BARELY = 1e-9
"""Contention that slows nothing, of labels that say what sharding costs."""
SCATTER = 0.04
"""Of the logarithm of a step's time; errors beyond it count less."""


@dataclass(frozen=True, eq=False)
class Run:
    """A row with what is computed of it once."""

    row: Row
    workload: Workload
    terms: Terms
    spec: DeviceSpec
    node: Node
    parallelism: Parallelism
    waiting_ms: float
    """Of a step, beside its passes."""
    hidden_ms: float
    """Collectives beside which something is computed."""

    @property
    def card(self) -> str:
        return DEVICES[self.row["device"]].split("-")[0]

    @property
    def step_s(self) -> float:
        return float(self.row["step_s"])

    def predicted_s(self, factors: Factors) -> float:
        """As answers have it."""
        prior = StepTimePrior(self.spec, self._constants(factors))
        step_ms = exp(float(prior.log_values([self.workload])[0]))
        work = replace(traced_work(self.workload, prior), contention=factors.contention)
        return schedule(work.lasting(step_ms), self.parallelism, self.node).step_ms / 1e3

    def about_s(self, factors: Factors) -> float:
        """The same, where nothing but the passes hangs on the factors."""
        passes_ms = self.parallelism.accumulation * self.passes_ms(factors)
        return (passes_ms + self.waiting_ms + factors.contention * self.hidden_ms) / 1e3

    def passes_ms(self, factors: Factors) -> float:
        """Of a forward and a backward pass, on a host that keeps up."""
        times = times_of(self.terms, Lookup(self._constants(factors)), self.spec)
        return float(times.device.sum() - times.optimizer.sum())

    def _constants(self, factors: Factors) -> torch.Tensor:
        return factors.times().moved(known_constants(self.card), self.spec)


@cache
def known_constants(card: str) -> torch.Tensor:
    """What other labels say of a card."""
    known, _ = known_of_others()
    basis = known.basis(card)
    return known.of_cards.get((basis, card), known.constants) if basis else known.constants


@cache
def step(
    hidden: int, layers: int, heads: int, vocabulary: int, length: int, checkpointing: bool
) -> StepProfile:
    """A step of MPT."""
    shape = gpt(hidden, layers, heads, vocabulary, length)
    with torch.device("meta"):
        decoder = Decoder(shape, Method(checkpointing=checkpointing), length).bfloat16()
        tokens = torch.zeros(2, length, dtype=torch.long)
    return Tracer(decoder, ExampleInputs.of(tokens), None, (2, 3)).step()


def sizes_of(row: Row) -> list[int]:
    return [whole(row, name) for name in ("hidden", "layers", "heads", "vocab", "seq_len")]


def parallelism_of(row: Row) -> Parallelism:
    gpus = whole(row, "n_gpus")
    return Parallelism(
        strategy=Strategy.FSDP,
        gpus=min(gpus, NODE),
        nodes=max(gpus // NODE, 1),
        accumulation=whole(row, "grad_accum", 1),
    )


def run_of(row: Row) -> Run:
    traced = step(*sizes_of(row), row["act_ckpt"] == "True")
    workload = Workload(
        graph=Graph.empty(whole(row, "micro_batch")),
        optimizer=Optimizer.ADAM,
        phase=Phase.TRAIN,
        step=traced,
        kernels=traced.kernels,
    )
    device = DEVICES[row["device"]]
    spec = spec_of(device)
    parallelism, node = parallelism_of(row), node_of(device)
    run = Run(row, workload, terms_of([workload], spec), spec, node, parallelism, 0.0, 0.0)
    work = traced_work(workload, StepTimePrior(spec, run._constants(START)))
    shared = schedule(replace(work, contention=BARELY), parallelism, node)
    return replace(
        run,
        waiting_ms=shared.step_ms - parallelism.accumulation * run.passes_ms(START),
        hidden_ms=max(shared.communication_ms - shared.exposed_ms, 0.0),
    )


def fit(runs: Sequence[Run]) -> dict[str, Factors]:
    """Of each card's model."""
    centre, widths = np.log(astuple(START)), np.array(WIDTHS)
    factors = {}
    for card in dict.fromkeys(run.card for run in runs):
        chosen = [run for run in runs if run.card == card]

        def misses(logs: np.ndarray, chosen: Sequence[Run] = chosen) -> np.ndarray:
            tried = Factors(*np.exp(logs).tolist())
            off = [np.log(run.about_s(tried) / run.step_s) / SCATTER for run in chosen]
            return np.concatenate([off, (logs - centre) / widths])

        factors[card] = Factors(*np.exp(least_squares(misses, centre, loss="soft_l1").x).tolist())
    return factors


def runs_of(rows: Sequence[Row]) -> list[Run]:
    """Rows in bf16; what fp8 reaches, no label of ours tells."""
    return [run_of(row) for row in rows if row["status"] == "ok" and row["precision"] != "amp_fp8"]


Learned = Mapping[str, Factors]
"""By a card's model."""


def unseen(runs: Sequence[Run]) -> dict[str, Learned]:
    """By a model's name, what all other models' rows say."""
    names = dict.fromkeys(run.row["model"] for run in runs)
    return {name: fit([run for run in runs if run.row["model"] != name]) for name in names}


def fitted(rows: Sequence[Row]) -> str:
    """The constants of all rows, and between what bounds errors of models held out are."""
    runs = runs_of(rows)
    factors, others = fit(runs), unseen(runs)
    lines = []
    for card, learned in factors.items():
        own = [run for run in runs if run.card == card]
        models = [run.row["model"] for run in own]
        ratios = [run.step_s / run.predicted_s(others[run.row["model"]][card]) for run in own]
        low, high = spread(ratios, models)
        lines.append(f"{card}: {learned}, errors=({low:.3f}, {high:.3f})")
    return "\n".join(lines)


def spread(ratios: Sequence[float], models: Sequence[str]) -> tuple[float, float]:
    """Between what bounds 90 % of measured over predicted are, each model with one vote."""
    order = np.argsort(ratios)
    votes = np.array([1 / models.count(model) for model in models])[order]
    levels = (np.cumsum(votes) - votes / 2) / votes.sum()
    low, high = np.interp([0.05, 0.95], levels, np.array(ratios)[order])
    return min(float(low), 1.0), max(float(high), 1.0)


def configuration(row: Row) -> dict[str, object]:
    """GPT-2's, in the shape of a row."""
    hidden, layers, heads, vocabulary, length = sizes_of(row)
    return {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads,
        "vocab_size": vocabulary, "n_positions": length, "activation_function": "gelu",
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """Seconds a step, with an interval where one is stated."""

    step_s: float
    interval: tuple[float, float] | None = None


def user_answer(row: Row, folder: Path, learned: Learned | None = None) -> Answer:
    """What a user is answered; with other constants than the package has, as if it had those."""
    file = folder / f"mpt-{'-'.join(map(str, sizes_of(row)))}.json"
    file.write_text(json.dumps(configuration(row)))
    shared = parallelism_of(row)
    others = {
        (card, True): replace(KNOWN[card, True], **vars(factors))
        for card, factors in (learned or {}).items()
    }
    with mock.patch.dict(KNOWN, others):
        answer = predict_parallel(
            f"hf:{file}" + (",checkpointing" if row["act_ckpt"] == "True" else ""),
            device=DEVICES[row["device"]],
            gpus=shared.gpus,
            nodes=shared.nodes,
            accumulation=shared.accumulation,
            strategy=shared.strategy,
            batch_size=whole(row, "micro_batch"),
            sequence_length=whole(row, "seq_len"),
            precision=Precision.BF16,
            optimizer="adamw",
        )
    low_ms, high_ms = answer.intervals["step_time_ms"]
    return Answer(answer.step_time_ms / 1e3, (low_ms / 1e3, high_ms / 1e3))


def judged(rows: Sequence[Row]) -> Iterator[Judged]:
    """Without any label of language models, with other models' labels, and as users ask."""
    runs = runs_of(rows)
    others = unseen(runs)
    with TemporaryDirectory() as name:
        folder = Path(name)
        kinds = {
            "images alone": [Answer(run.predicted_s(PLAIN)) for run in runs],
            "models held out": [
                Answer(run.predicted_s(others[run.row["model"]][run.card])) for run in runs
            ],
            "asked, held out": [user_answer(r.row, folder, others[r.row["model"]]) for r in runs],
            "asked": [user_answer(run.row, folder) for run in runs],
        }
    for kind, values in kinds.items():
        for run, value in zip(runs, values, strict=True):
            row = run.row
            yield Judged(
                group=f"llm-foundry {run.card}, {kind}",
                model=row["model"],
                what=f"{row['seq_len']} x {row['micro_batch']} on {row['n_gpus']} {row['device']}",
                measured=run.step_s,
                predicted=value.step_s,
                interval=value.interval,
            )
