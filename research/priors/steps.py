"""Published steps of all cards, with traced kernels, as evidence for fits.

Traces are cached in a folder, so that an interrupted run can continue.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pandas as pd
import typer

from research.data import ROOT
from research.held_out import Array, Chosen
from research.importers import milabench, node_steps
from research.priors.joint_fit import Distribution, Evidence, JointFit
from research.snapshot.shipped_sheets import H100_FILES, MILABENCH_FILE, our_labels
from trappm.cluster.trace_tasks import trace_of
from trappm.learner.interface import Workload
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time import spreads, starting_constants
from trappm.learner.stats.folds import content_groups
from trappm.profiler.devices.catalogue import known_spec, read_name, spec_of
from trappm.profiler.models.zoo import current_name
from trappm.profiler.records import (
    Configuration,
    Graph,
    Measurement,
    MemoryFormat,
    Optimizer,
    Outcome,
    Phase,
    Precision,
)
from trappm.profiler.records.step_scope import WHOLE_STEP, StepScope
from trappm.profiler.traced_step import KernelKind, Size, StepKernels, Trace, TraceFolder, TraceKey

Traces = Annotated[Path, typer.Option(help="Folder of cached traces.")]
TRACES = Path("traces")

OF_DEVICES = 0.35
"""Initial spread of constants between devices, as a share of their spread; labels change it."""
NVIDIA = "deep-learning-examples"
DASHBOARD = "pytorch-dashboard"
DASHBOARD_FILE = ROOT / "research/data/pytorch_dashboard_a100.csv"
"""Training steps of timm's models, eager and compiled by inductor without CUDA graphs, from the
tables in pytorch/pytorch's issues 96191 (autocast) and 96192 (fp32) of March 2023. The excerpts
that we could read have the first ten or eleven rows of each table: the longest steps, the largest
speed-ups and the largest savings of memory."""
HOST_BOUND = ("a100-sxm4-40gb", "rtx-3090")
"""Cards on which pytorch-gpu-benchmark's steps of 12 images wait for the host. Fits explained these
steps by convolutions in TF32 that are 1.6 times as slow as the data sheet."""
SIMILAR = {
    "efficientnet-widese-b0": ("efficientnet_b0", 224),
    "efficientnet-widese-b4": ("efficientnet_b4", 380),
}
"""timm's model and input size for NVIDIA's with wide squeeze-excitation, which timm lacks: only two
products of one pixel per block differ."""
MIN_BATCH = 32
"""Smallest batch of NVIDIA's steps that are learned from: smaller steps wait for their host."""
TRAINING = {"per_gpu_micro_batch": "batch", "micro_step_ms_derived": "step_ms"}
INFERENCE = {"per_gpu_batch": "batch", "latency_from_throughput_ms": "step_ms"}
"""Columns of the two sheets. Mean latencies have outliers, throughputs have none."""


PAIRS_FILE = "new/timm_infer_2026_eager_and_compiled.csv.gz"
"""timm's inference steps, eager and compiled."""
TIMM_2026 = "timm-2026"
MAX_Q = "rtx-pro-6000-blackwell-max-q-workstation"
PAIRS_CARDS = {"rtx-4090": "4090", MAX_Q: "pro6000maxq"}
"""Name in PAIRS_FILE by card of the catalogue."""
SAME_PARAMETERS = 0.02
"""Largest relative difference of the numbers of parameters of equal models. timm fuses branches of
some models (RepVGG, FastViT, LeViT, MobileOne), which ours have."""


@dataclass(frozen=True, eq=False)
class PublishedSteps:
    """Steps of one source on one device (n rows)."""

    evidence: Evidence
    architectures: npt.NDArray[np.str_]

    @classmethod
    def of(
        cls, device: str, host: str, rows: Sequence[tuple[Workload, str, float]]
    ) -> PublishedSteps:
        """Combine workloads, architectures and step times in ms of a device key."""
        workloads = [workload for workload, _, _ in rows]
        times = np.array([step_ms for _, _, step_ms in rows])
        card, spec = read_name(device).model, spec_of(device)
        evidence = Evidence(card, host, spec, workloads, np.log(times))
        return cls(evidence, np.array([name for _, name, _ in rows], dtype=np.str_))

    def at(self, chosen: Chosen) -> PublishedSteps:
        return PublishedSteps(self.evidence.at(chosen), self.architectures[chosen])

    @property
    def step_time_ms(self) -> Array:
        return np.exp(self.evidence.log_values)

    @cached_property
    def groups(self) -> npt.NDArray[np.str_]:
        """Group that each row is held out with: architectures of equal kernels are one."""
        return np.array(content_groups(self.architectures.tolist(), self.evidence.workloads))

    def errors(self, prior: Prior) -> dict[Phase, Array]:
        """Return log(measured / predicted) by phase."""
        logs = self.evidence.log_values - prior.log_values(self.evidence.workloads)
        phases = np.array([workload.phase for workload in self.evidence.workloads])
        return {phase: logs[phases == phase] for phase in Phase if (phases == phase).any()}


def cached_step(key: TraceKey, traces: Path) -> Trace | None:
    """Return a step from the folder, or trace and cache it; None if it cannot be traced."""
    cache = TraceFolder(traces)
    made = cache.get(key)
    if made is None:
        traced = trace_of(key)
        traced.keep(cache)
        made = traced.made
        if traced.remark:
            sys.stderr.write(f"left out: {traced.remark}\n")
    return made if isinstance(made, Trace) and made.allocations is not None else None


def kernels(key: TraceKey, traces: Path) -> StepKernels | None:
    """Return the kernels of a cached step, or None if it cannot be traced."""
    step = cached_step(key, traces)
    return None if step is None else step.kernels


def traced(
    what: Configuration, scope: StepScope, traces: Path, *, fused_attention: bool = True
) -> Workload | None:
    """Return the workload of a step with its kernels, or None if they cannot be traced."""
    step = kernels(TraceKey.of(what, fused_attention=fused_attention), traces)
    if step is None:
        return None
    return Workload(
        graph=Graph.empty(what.batch_size),
        precision=what.precision,
        memory_format=what.memory_format,
        optimizer=what.optimizer,
        phase=what.phase,
        scope=scope,
        kernels=step,
    )


def traced_label(label: Measurement, traces: Path) -> Workload | None:
    return traced(label.configuration, StepScope.of(label.environment), traces)


@dataclass(frozen=True)
class TimmSheet:
    """A file of timm's own benchmark results: SGD with momentum, autocast to fp16."""

    file: str
    device: str
    phase: Phase
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS

    @property
    def host(self) -> str:
        return "timm" if self.phase is Phase.TRAIN else f"timm {self.device}"


TIMM = {
    "train": TimmSheet("rtx3090_train_step_amp_nchw.csv", "rtx3090", Phase.TRAIN),
    "train-nhwc": TimmSheet(
        "rtx3090_train_step_amp_nhwc.csv", "rtx3090", Phase.TRAIN, MemoryFormat.CHANNELS_LAST
    ),
    "infer-3090": TimmSheet("rtx3090_infer_step_amp_nchw.csv", "rtx3090", Phase.INFER),
    "infer-4090": TimmSheet("rtx4090_infer_step_amp_nchw.csv", "rtx4090", Phase.INFER),
}
TIMM_STEPS = {Phase.TRAIN: 250, Phase.INFER: 120}
"""Steps of each sheet in fits of several cards."""


def timm_steps(key: str, data: Path, traces: Path, most: int | None = None) -> PublishedSteps:
    """Return the steps of a sheet of TIMM whose models timm can build and PyTorch can trace.

    Args:
        key: Name of the sheet.
        data: Folder of published sheets.
        traces: Folder of traced kernels.
        most: Number of rows, drawn at random (default: all).
    """
    sheet = TIMM[key]
    table = pd.read_csv(data / sheet.file)
    if most is not None:
        table = table.iloc[np.random.default_rng(0).permutation(len(table))[:most]]
    rows = []
    for row in table.to_dict("records"):
        name = str(row["architecture"])
        what = Configuration(
            architecture=name,
            batch_size=int(row[f"{sheet.phase}_batch_size"]),
            input_size=int(row[f"{sheet.phase}_img_size"]),
            precision=Precision.AMP_FP16,
            memory_format=sheet.memory_format,
            optimizer=Optimizer.MOMENTUM,
            phase=sheet.phase,
        )
        # PyTorch 1.12, used for the training sheets, has no fused attention.
        fused = sheet.phase is Phase.INFER
        workload = traced(what, WHOLE_STEP, traces, fused_attention=fused)
        if workload is not None:
            rows.append((workload, current_name(name), float(row[f"{sheet.phase}_step_time"])))
    return PublishedSteps.of(sheet.device, sheet.host, rows)


def some_timm_steps(key: str, data: Path, traces: Path) -> PublishedSteps:
    return timm_steps(key, data, traces, TIMM_STEPS[TIMM[key].phase])


def max_q_steps(data: Path, traces: Path) -> PublishedSteps:
    """Return eager inference steps of an RTX PRO 6000 Max-Q in autocast, drawn at random."""
    sheet = pd.read_csv(data / PAIRS_FILE)
    is_own = (sheet.device == PAIRS_CARDS[MAX_Q]) & ~sheet.compiled & (sheet.precision == "amp")
    sheet = sheet[is_own].sample(TIMM_STEPS[Phase.INFER], random_state=0)
    rows = []
    for row in sheet.to_dict("records"):
        name = current_name(str(row["model"]))
        what = Configuration(
            architecture=name,
            batch_size=int(row["infer_batch_size"]),
            input_size=int(row["infer_img_size"]),
            precision=Precision.AMP_FP16,
            optimizer=Optimizer.MOMENTUM,
            phase=Phase.INFER,
        )
        step, workload = cached_step(TraceKey.of(what), traces), traced(what, WHOLE_STEP, traces)
        if workload is None or step is None or step.allocations is None:
            continue
        parameters = float(np.sum(step.allocations.buffer_bytes)) / 4e6
        if abs(row["param_count"] / parameters - 1) < SAME_PARAMETERS:
            rows.append((workload, name, float(row["infer_step_time"])))
    return PublishedSteps.of(MAX_Q, TIMM_2026, rows)


def milabench_steps(data: Path, traces: Path) -> list[PublishedSteps]:
    """Return milabench's training steps by card."""
    rows: dict[str, list[tuple[Workload, str, float]]] = defaultdict(list)
    for row in milabench.parse_rows(data / MILABENCH_FILE):
        label = row.measurement
        if label is None or label.step_time_ms is None:
            continue
        workload = traced_label(label, traces)
        if workload is not None:
            rows[label.device].append(
                (workload, label.configuration.architecture, label.step_time_ms)
            )
    return [
        PublishedSteps.of(device, f"{milabench.SOURCE} {device}", labelled)
        for device, labelled in rows.items()
    ]


def node_sheet_steps(nodes: Path, traces: Path) -> list[PublishedSteps]:
    """Return pycls' and pytorch-gpu-benchmark's steps by source, run and device of the catalogue.

    Those of `HOST_BOUND` are left out.
    """
    rows: dict[tuple[str, str, str], list[tuple[Workload, str, float]]] = defaultdict(list)
    for file in ("pycls_v100_step_fp32.csv", "pgb_torchvision_step.csv"):
        for row in node_steps.parse_rows(nodes / file):
            label = row.measurement
            if label is None or label.step_time_ms is None or known_spec(label.device) is None:
                continue
            if label.device in HOST_BOUND:
                continue
            workload = traced_label(label, traces)
            if workload is not None:
                key = label.device, label.protocol.name, str(label.environment["run"])
                rows[key].append((workload, label.configuration.architecture, label.step_time_ms))
    return [
        PublishedSteps.of(device, f"{source} {device} {run}", labelled)
        for (device, source, run), labelled in rows.items()
    ]


def nvidia_steps(nodes: Path, traces: Path) -> list[PublishedSteps]:
    """Return NVIDIA's steps on one GPU by card, without rows marked as suspect."""
    training = pd.read_csv(nodes / "dle_train_throughput.csv").rename(columns=TRAINING)
    training = training[(training.n_gpus == 1) & training.suspect.isna()]
    inference = pd.read_csv(nodes / "dle_infer_latency.csv").rename(columns=INFERENCE)
    sheet = pd.concat([training.assign(phase=Phase.TRAIN), inference.assign(phase=Phase.INFER)])
    sheet = sheet[sheet.model.isin(SIMILAR) & sheet.step_ms.notna() & (sheet.batch >= MIN_BATCH)]
    rows: dict[str, list[tuple[Workload, str, float]]] = defaultdict(list)
    for row in sheet.to_dict("records"):
        name, size = SIMILAR[str(row["model"])]
        half = row["precision"] == "amp"
        what = Configuration(
            architecture=name,
            batch_size=int(row["batch"]),
            input_size=size,
            phase=row["phase"],
            precision=Precision.AMP_FP16 if half else Precision.FP32,
            # NVIDIA's scripts use channels-last only with autocast.
            memory_format=MemoryFormat.CHANNELS_LAST if half else MemoryFormat.CONTIGUOUS,
            optimizer=Optimizer.MOMENTUM,
        )
        workload = traced(what, WHOLE_STEP, traces)
        if workload is not None:
            rows[str(row["device"]).lower()].append((workload, name, float(row["step_ms"])))
    return [
        PublishedSteps.of(device, f"{NVIDIA} {device}", labelled)
        for device, labelled in rows.items()
    ]


def dashboard_steps(traces: Path) -> PublishedSteps:
    """Return the eager training steps of PyTorch's compiler dashboard on an A100.

    The dashboard allows TF32 in matrix products, too, which our fp32 does not: steps in fp32 are
    used only if nearly all of their arithmetic is in convolutions.
    """
    sheet = pd.read_csv(DASHBOARD_FILE)
    rows = []
    for row in sheet[sheet.eager_ms.notna()].to_dict("records"):
        what = Configuration(
            architecture=row["architecture"],
            batch_size=int(row["batch_size"]),
            input_size=int(row["input_size"]),
            precision=Precision(row["precision"]),
            memory_format=MemoryFormat.CONTIGUOUS,
            optimizer=Optimizer.SGD,
            phase=Phase.TRAIN,
        )
        # timm had no fused attention before May 2023.
        workload = traced(what, WHOLE_STEP, traces, fused_attention=False)
        is_half = what.precision is not Precision.FP32
        if workload is not None and (is_half or _is_convolutional(workload)):
            rows.append((workload, what.architecture, float(row["eager_ms"])))
    return PublishedSteps.of("a100-40gb", f"{DASHBOARD} a100-40gb", rows)


def _is_convolutional(workload: Workload) -> bool:
    """Return whether less than 2 % of the arithmetic of a step is in matrix products."""
    assert workload.kernels is not None
    kernels = workload.kernels.at(workload.batch_size)
    table = kernels.table
    flops = table.counts * kernels.sizes[:, Size.FLOPS]
    is_product = (table.kinds > KernelKind.DEPTHWISE) & (table.kinds <= KernelKind.ATTENTION)
    return bool(flops[is_product].sum() < 0.02 * flops.sum())


def h100_labels() -> list[Measurement]:
    """Return our own successful labels of one GPU day."""
    labels = [label for file in H100_FILES for label in our_labels(file)]
    return [label for label in labels if label.outcome is Outcome.OK]


def h100_steps(traces: Path) -> PublishedSteps:
    rows = [
        (workload, label.configuration.architecture, label.step_time_ms)
        for label in h100_labels()
        if label.step_time_ms is not None and (workload := traced_label(label, traces)) is not None
    ]
    return PublishedSteps.of("h100", "trappm", rows)


def learned_from(evidence: Iterable[Evidence]) -> JointFit:
    """Fit the constants of all devices to this evidence."""
    first = Distribution.first(starting_constants(), spreads(1.0), of_devices=OF_DEVICES)
    return JointFit(list(evidence), first, learns=True)
