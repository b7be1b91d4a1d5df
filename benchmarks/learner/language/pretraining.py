"""Seconds a step of llm-foundry's pretraining: kernels of a traced step, and FSDP's collectives.

    step = accumulation * (kernels + exposed share * collectives) + the optimizer on a rank's share

The module is llm-foundry's MPT with parameters cast to bf16, as FSDP has it, flash attention and
checkpointing of whole layers. Four constants for a card's model are learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np
import torch
from scipy.optimize import least_squares

from benchmarks.learner.language.decoder import Decoder, Method
from benchmarks.learner.language.rows import Judged, Row, held_out, whole
from benchmarks.learner.language.shapes import gpt
from trappm.learner.heads.other_devices import known_of_others
from trappm.learner.physics.device_specs import DeviceSpec, spec_of
from trappm.learner.physics.kernel_terms import Terms, terms_of
from trappm.learner.physics.kernel_times import Lookup, times_of
from trappm.learner.physics.parallel.collectives import Group
from trappm.learner.physics.parallel.links import node_of
from trappm.learner.physics.transformer_times import TransformerTimes
from trappm.learner.workload import Workload
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.records import Graph, MemoryFormat, Phase, Precision
from trappm.profiler.records.step_scope import StepScope
from trappm.profiler.simulation.kernel_profile import KernelProfile
from trappm.profiler.tracing.tracer import Tracer

DEVICES = {"A100-40GB": "a100", "A100-80GB": "a100-80gb", "H100-80GB": "h100"}
NODE = 8
UPDATE_BYTES = 40.0
"""Read and written for each parameter of a rank's share by a plain optimizer in fp32."""
START = TransformerTimes(products=1.1, attention=1.5, exposed=0.5, exposed_between=0.5)
WIDTHS = (0.3, 0.3, 1.0, 1.0)
"""Of Gaussian priors of the logarithms: of what a kernel reaches, and of what is hidden."""
SCATTER = 0.04
"""Of the logarithm of a step's time; errors beyond it count less."""


@dataclass(frozen=True, eq=False)
class Run:
    """A row with what is computed of it once."""

    row: Row
    terms: Terms
    spec: DeviceSpec
    card: str
    collectives_s: float
    """Of a step, hidden ones too."""
    update_s: float

    @property
    def step_s(self) -> float:
        return float(self.row["step_s"])

    def predicted_s(self, times: TransformerTimes) -> float:
        constants = times.moved(known_constants(self.card))
        device = times_of(self.terms, Lookup(constants), self.spec).device
        several = whole(self.row, "n_gpus") > NODE
        exposed = times.exposed_between if several else times.exposed
        passes = whole(self.row, "grad_accum", 1) * float(device.sum()) / 1e3
        return passes + exposed * self.collectives_s + self.update_s


@cache
def known_constants(card: str) -> torch.Tensor:
    """What other labels say of a card."""
    known, _ = known_of_others()
    basis = known.basis(card)
    return known.of_cards.get((basis, card), known.constants) if basis else known.constants


@cache
def kernels(
    hidden: int, layers: int, heads: int, vocabulary: int, length: int, checkpointing: bool
) -> KernelProfile:
    """Of a training step of MPT."""
    shape = gpt(hidden, layers, heads, vocabulary, length)
    with torch.device("meta"):
        decoder = Decoder(shape, Method(checkpointing=checkpointing), length).bfloat16()
        tokens = torch.zeros(2, length, dtype=torch.long)
    _, table = Tracer(decoder, ExampleInputs.of(tokens), None, (2, 3)).phase(Phase.TRAIN)
    sizes = [p.numel() for p in decoder.parameters()]
    return KernelProfile(
        train=table, infer=table, parameter_tensors=len(sizes), parameters=sum(sizes),
        precision=Precision.FP32, memory_format=MemoryFormat.CONTIGUOUS,
    )  # fmt: skip


def run_of(row: Row) -> Run:
    names = ("hidden", "layers", "heads", "vocab", "seq_len")
    _hidden, layers, *_ = sizes = [whole(row, name) for name in names]
    profile = kernels(*sizes, row["act_ckpt"] == "True")
    workload = Workload(
        graph=Graph.empty(whole(row, "micro_batch")),
        kernels=profile,
        scope=StepScope(updates=False, waits_for_host=False),
    )
    device = DEVICES[row["device"]]
    spec, gpus = spec_of(device), whole(row, "n_gpus")
    group = Group(node=node_of(device), gpus=min(gpus, NODE), nodes=max(gpus // NODE, 1))
    gathers = 2 if row["sharding"] == "FULL_SHARD" else 1
    reduced_bytes = 2 if row["mp_mode"] == "PURE" else 4
    each = profile.parameters / layers
    once = gathers * group.all_gather_ms(2 * each) + group.reduce_scatter_ms(reduced_bytes * each)
    update = UPDATE_BYTES * profile.parameters / gpus / (spec.bandwidth_gbs * 1e9)
    passes = whole(row, "grad_accum", 1)
    return Run(
        row, terms_of([workload], spec), spec, device.split("-")[0],
        passes * layers * once / 1e3, update,
    )  # fmt: skip


def fit(runs: Sequence[Run]) -> dict[str, TransformerTimes]:
    """Constants of each card's model."""
    centre, widths = np.log(astuple(START)), np.array(WIDTHS)
    constants = {}
    for card in dict.fromkeys(run.card for run in runs):
        chosen = [run for run in runs if run.card == card]

        def misses(logs: np.ndarray, chosen: Sequence[Run] = chosen) -> np.ndarray:
            times = _times(logs)
            off = [np.log(run.predicted_s(times) / run.step_s) / SCATTER for run in chosen]
            return np.concatenate([off, (logs - centre) / widths])

        constants[card] = _times(least_squares(misses, centre, loss="soft_l1").x)
    return constants


def _times(logs: np.ndarray) -> TransformerTimes:
    products, attention, exposed, between = np.exp(logs).tolist()
    return TransformerTimes(
        products=products, attention=attention, exposed=exposed, exposed_between=between
    )


def runs_of(rows: Sequence[Row]) -> list[Run]:
    """Rows in bf16; what fp8 reaches, no label of ours tells."""
    return [run_of(row) for row in rows if row["status"] == "ok" and row["precision"] != "amp_fp8"]


def fitted(rows: Sequence[Row]) -> str:
    return "\n".join(f"{card}: {times}" for card, times in fit(runs_of(rows)).items())


def judged(rows: Sequence[Row]) -> Iterator[Judged]:
    """Without any label of language models, and with other models' labels."""
    runs = runs_of(rows)
    plain = TransformerTimes(attention=1.0, exposed=0.0, exposed_between=0.0)

    def predictor(others: Sequence[Run]) -> Callable[[Run], float]:
        constants = fit(others)
        return lambda run: run.predicted_s(constants[run.card])

    after = held_out(runs, lambda run: run.row["model"], predictor)
    for kind, values in (
        ("constants of images alone", [run.predicted_s(plain) for run in runs]),
        ("models held out", after),
    ):
        for run, value in zip(runs, values, strict=True):
            row = run.row
            yield Judged(
                group=f"llm-foundry {run.card}, {kind}"[:36],
                model=row["model"],
                what=f"{row['seq_len']} x {row['micro_batch']} on {row['n_gpus']} {row['device']}",
                measured=run.step_s,
                predicted=value,
            )
