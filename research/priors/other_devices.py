"""Errors of predictions for cards without labels, and shipped constants of such cards
(docs/research/step_time.md).

Each card with labels is held out as a whole: its step times are predicted from its data sheet and
the other cards' labels, and again with kernels of its own where they were timed; then, by held-out
architectures, from its own steps and all others'. Memory is predicted for an A100 (GPUMemNet,
software of 2023) and an H100 (our own labels) from simulated steps alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from research.data import data_folder
from research.evaluation.label_files import read_labels, read_usable
from research.evaluation.workbench import CORES, Workbench
from research.held_out import Array, percent_errors
from research.importers import milabench
from research.priors import IsWriting
from research.priors.joint_fit import Distribution, Evidence, JointFit, SharedPrior
from research.priors.kernel_sources import (
    NEUSIGHT_SHARES,
    PRODUCT_CARDS,
    PRODUCTS_FILE,
    SAILOR,
    SAILOR_CARDS,
    SAILOR_FILE,
    half_products,
    megatron_products,
    published_kernels,
)
from research.priors.second_device import judge_v100, medians
from research.priors.steps import (
    DASHBOARD,
    NVIDIA,
    PAIRS_FILE,
    TIMM,
    TIMM_2026,
    TRACES,
    PublishedSteps,
    Traces,
    dashboard_steps,
    h100_labels,
    h100_steps,
    learned_from,
    max_q_steps,
    milabench_steps,
    node_sheet_steps,
    nvidia_steps,
    some_timm_steps,
)
from research.snapshot.shipped_sheets import MILABENCH_FILE
from trappm.learner.heads.physics_heads import (
    OTHER_CARDS,
    OTHERS_FILE,
    Basis,
    OtherDevices,
    constants_on,
    known_of_others,
    write_others,
)
from trappm.learner.physics.memory import MemoryPrior
from trappm.learner.physics.step_time import StepTimePrior
from trappm.learner.stats.calibration import LEVELS, Calibration
from trappm.learner.stats.folds import grouped_folds
from trappm.profiler.devices.catalogue import most_similar, spec_of
from trappm.profiler.memory.simulation import LoopPreset
from trappm.profiler.records import MemoryFormat, Phase

FOLDS = 4
"""Number of folds of architectures to evaluate cards with labels."""
KEPT = "a100"
"""Card whose constants stay as they are shipped: the factors of language models, generation and
Megatron-LM are relative to them, and it has no new steps. Refit all of them together."""
MIN_ARCHITECTURES = 2 * FOLDS
"""Number of architectures from which a card's own errors are judged: with few, a fold leaves none
that resembles the held-out ones."""
LEVELS_OF_CARDS = 0.5 + 1.02 * (LEVELS - 0.5)
"""Levels of the pooled errors of cards, wider by so much that an interval of 90 % holds 90 % of the
rows of a held-out card without published figures. It was chosen on these rows."""
STEP_TIME, MEMORY = "step time", "memory"
KEYS = ["metric", "device", "basis", "phase"]


def error_rows(
    metric: str, device: str, basis: Basis, phase: Phase, logs: Array, names: Sequence[str] = ()
) -> pd.DataFrame:
    """Return a row per label with its log(measured / predicted) and, for memory, architecture."""
    return pd.DataFrame(
        {
            "metric": metric,
            "device": device,
            "basis": basis,
            "phase": phase,
            "log": logs,
            "architecture": list(names) or "",
        }
    )


def error_table(errors: pd.DataFrame) -> pd.DataFrame:
    """Return count, mean error, common factor and remaining error of each card in percent."""
    logs = errors.groupby(KEYS, sort=False).log
    middle = logs.median()
    return pd.DataFrame(
        {
            "rows": logs.size(),
            "mean_%": logs.apply(lambda log: percent_errors(log).mean()),
            "common_factor_%": 100 * np.expm1(middle),
            "of_one_model_%": logs.apply(lambda log: 148 * (log - log.median()).abs().median()),
        }
    ).round(1)


def all_evidence(data: Any, traces: Any) -> tuple[list[PublishedSteps], list[Evidence]]:
    """Return steps and kernels of all known cards."""
    nodes = data / "nodes"
    train, infer = ([k for k in TIMM if k.startswith(phase)] for phase in ("train", "infer"))
    known = [
        *node_sheet_steps(nodes, traces),
        *(some_timm_steps(key, data, traces) for key in train),
        *nvidia_steps(nodes, traces),
        dashboard_steps(traces),
        *(some_timm_steps(key, data, traces) for key in infer),
        h100_steps(traces),
        *milabench_steps(data, traces),
        max_q_steps(data, traces),
    ]
    kernels = [
        *(published_kernels(nodes, card) for card in NEUSIGHT_SHARES),
        *(half_products(data, card) for card in PRODUCT_CARDS),
        *(megatron_products(data, card) for card in SAILOR_CARDS),
    ]
    return known, kernels


def like_nearest(fit: JointFit, device: str, models: Iterable[str]) -> Distribution:
    """Return the prior of a card without steps, centered at the most similar of these cards."""
    like = most_similar(device, sorted(models))
    common = fit.of_another_device()
    if like is None:
        return common
    return replace(common, centre=constants_on(device, like, fit.constants(like)))


def step_time_errors(
    known: Sequence[PublishedSteps], kernels: Sequence[Evidence], cards: Sequence[str] = ()
) -> Iterator[pd.DataFrame]:
    """Yield the errors of each card held out as a whole, by the basis of its constants."""
    for device in sorted({steps.evidence.device for steps in known}):
        if cards and device not in cards:
            continue
        fit = learned_from(
            [s.evidence for s in known if s.evidence.device != device]
            + [e for e in kernels if e.device != device]
        )
        own = [e for e in kernels if e.device == device]
        common = like_nearest(fit, device, {s.evidence.device for s in known} - {device})
        for basis in (Basis.SPECIFICATION, *((Basis.KERNELS,) if own else ())):
            for steps in (s for s in known if s.evidence.device == device):
                prior = SharedPrior.like_others(
                    steps.evidence.spec, common, own if basis is Basis.KERNELS else ()
                )
                for phase, logs in steps.errors(prior).items():
                    yield error_rows(STEP_TIME, device, basis, phase, logs)


def new_architecture_errors(
    known: Sequence[PublishedSteps], kernels: Sequence[Evidence]
) -> Iterator[pd.DataFrame]:
    """Yield the errors of cards with steps of other architectures, on a host without labels."""
    names = np.unique(np.concatenate([steps.architectures for steps in known]))
    folds = grouped_folds(names.tolist(), FOLDS, np.random.default_rng(0))
    for fold in range(FOLDS):
        unseen = [np.isin(steps.architectures, names[folds == fold]) for steps in known]
        parts = list(zip(known, unseen, strict=True))
        fit = learned_from([*(s.evidence.at(~own) for s, own in parts), *kernels])
        judged = (s.at(own) for s, own in parts if len({*s.architectures}) >= MIN_ARCHITECTURES)
        for steps in judged:
            device, spec = steps.evidence.device, steps.evidence.spec
            prior = StepTimePrior(spec, fit.constants(device))
            for phase, logs in steps.errors(prior).items():
                yield error_rows(STEP_TIME, device, Basis.STEPS, phase, logs)


def memory_errors(data: Any) -> Iterator[pd.DataFrame]:
    """Yield the errors of simulated steps that no label of the card has adjusted.

    Two properties belong to the labels and not to the card, so they are given for the A100's sheet:
    the memory outside the allocator (`PROCESS_MIB`), and the training loop. The H100's labels are
    of a plain process, which users have.
    """
    a100 = read_labels(data / "a100_40gb_train_memory.csv")
    usable = read_usable(data / "a100_40gb_train_memory_quality.csv")
    for device, labels, judged, prior in (
        ("a100", a100, usable, MemoryPrior(loop=LoopPreset.TUNED)),
        ("h100", h100_labels(), None, MemoryPrior.on(spec_of("h100"))),
    ):
        bench = Workbench(metric="memory_mib", processes=CORES, usable=judged)
        samples = bench.prepared(labels).samples
        logs = np.log(samples.values) - prior.log_values(samples.workloads)
        phases = np.array([workload.phase for workload in samples.workloads])
        for phase in Phase:
            chosen = samples.judged & (phases == phase)
            if chosen.any():
                names = np.array(samples.groups)[chosen].tolist()
                yield error_rows(MEMORY, device, Basis.SPECIFICATION, phase, logs[chosen], names)


def pooled_errors(
    errors: Array, devices: Sequence[str], architectures: Sequence[str], levels: Array = LEVELS
) -> Calibration:
    """Return quantiles of log(measured / predicted) on held-out cards, pooled over cards.

    Every card has the same weight, shared by its architectures.

    Args:
        errors: Error of each label, shape (n,).
        devices: Card of each label, shape (n,).
        architectures: Architecture of each label, shape (n,); empty strings are one.
        levels: Share of the pooled errors below each quantile, shape (levels,).
    """
    weights = np.ones(len(errors))
    models = [f"{card} {name}" for card, name in zip(devices, architectures, strict=True)]
    for groups in (models, devices):
        _, number = np.unique(np.array(groups), return_inverse=True)
        weights /= np.bincount(number, weights)[number]
    order = np.argsort(errors)
    weights = weights[order] / weights.sum()
    below = np.cumsum(weights) - weights / 2
    return Calibration(np.interp(levels, below, errors[order]))


def memory_quantiles(errors: pd.DataFrame) -> Calibration:
    """Return the quantiles of memory in training, which are only indicative with two cards.

    Inference is left out: its process was measured on one of the cards only.
    """
    rows = errors[(errors.metric == MEMORY) & (errors.phase == Phase.TRAIN)]
    return pooled_errors(rows.log.to_numpy(), rows.device.tolist(), rows.architecture.tolist())


def quantiles(errors: pd.DataFrame, basis: str, phase: str) -> Calibration:
    """Return the quantiles of step times of a basis; the data sheet replaces a missing one."""
    rows = errors[(errors.metric == STEP_TIME) & (errors.phase == phase)]
    has = rows[rows.basis == basis].device.unique()
    wanted = np.where(rows.device.isin(has), str(basis), str(Basis.SPECIFICATION))
    rows = rows[rows.basis.astype(str) == wanted]
    return pooled_errors(
        rows.log.to_numpy(), rows.device.tolist(), rows.architecture.tolist(), LEVELS_OF_CARDS
    )


def coverage(errors: pd.DataFrame) -> str:
    """Describe the coverage of 90 % intervals from other cards' errors."""
    rows = []
    for (metric, device, basis, phase), own in errors.groupby(KEYS, sort=False):
        others = errors[errors.device != device]
        known = memory_quantiles(others) if metric == MEMORY else quantiles(others, basis, phase)
        inside = 100 * own.log.between(*known.interval()).mean()
        rows.append({"metric": metric, "basis": basis, "phase": phase, "inside_%": inside})
    shares = pd.DataFrame(rows).groupby(["metric", "basis", "phase"], sort=False)["inside_%"]
    table = shares.agg(["size", "mean", "min"]).round(1)
    low, high = np.exp(memory_quantiles(errors).interval())
    return (
        f"inside the 90 % interval of the other cards:\n{table.to_string()}\n"
        f"90 % interval of memory from both cards: {low:.3f} to {high:.3f}"
    )


def shipped(
    known: Sequence[PublishedSteps], kernels: Sequence[Evidence], errors: pd.DataFrame
) -> OtherDevices:
    """Return the constants of other cards that all labels imply, with the quantiles of errors."""
    fit = learned_from([*(s.evidence for s in known), *kernels])
    steps = sorted({s.evidence.device for s in known})
    of_cards = {(Basis.STEPS, card): fit.constants(card) for card in steps}
    of_cards[Basis.STEPS, KEPT] = known_of_others()[0].constants_of(KEPT)
    of_cards |= {
        (Basis.KERNELS, card): SharedPrior.like_others(
            spec_of(card),
            like_nearest(fit, card, steps),
            [e for e in kernels if e.device == card],
        ).constants
        for card in sorted({e.device for e in kernels} - {*steps})
    }
    return OtherDevices(
        fit.of_another_device().centre,
        of_cards,
        {(b, p): quantiles(errors, b, p) for b in Basis for p in Phase},
        memory_quantiles(errors),
    )


FILES: Mapping[str, tuple[str, str]] = {
    "pycls": ("nodes/pycls_v100_step_fp32.csv", "MIT"),
    "pytorch-gpu-benchmark": ("nodes/pgb_torchvision_step.csv", "MIT"),
    "timm": ("{card}_{phase}_step_amp_{layout}.csv", "Apache-2.0"),
    NVIDIA: ("nodes/dle_{{train_throughput,infer_latency}}.csv", "BSD-3-Clause"),
    DASHBOARD: ("research/data/pytorch_dashboard_a100.csv", ""),
    TIMM_2026: (PAIRS_FILE, "Apache-2.0"),
    milabench.SOURCE: (MILABENCH_FILE, "MIT"),
    SAILOR: (SAILOR_FILE, "MIT"),
    "neusight": ("nodes/neusight_kernels_fp32_{part}.csv.gz", "MIT"),
    "aiconfigurator": (PRODUCTS_FILE, "Apache-2.0"),
    "trappm": ("h100/sweeps", ""),
}
"""File and licence of each source."""


def source_of(evidence: Evidence) -> dict[str, object]:
    """Return the manifest's entry for evidence."""
    file, licence = FILES[evidence.host.split()[0]]
    first = evidence.workloads[0]
    file = file.format(
        card=evidence.device.replace("-", ""),
        phase=first.phase,
        layout="nhwc" if first.memory_format is MemoryFormat.CHANNELS_LAST else "nchw",
        part="v100_a100" if evidence.device in {"v100", "a100"} else "other_gpus",
    )
    return {
        "device": evidence.device,
        "metric": "step_time_ms",
        "for": OTHER_CARDS,
        "file": file,
        "source": evidence.host.strip(),
        **({"licence": licence} if licence else {}),
        "labels": len(evidence.workloads),
    }


def main(
    traces: Traces = TRACES,
    v100: Annotated[
        int, typer.Option(help="Number of seeds of the `second-device` evaluation on a V100.")
    ] = 0,
    is_writing: IsWriting = False,
) -> None:
    """Print the errors of each card and the coverage, and write the shipped constants."""
    data = data_folder()
    steps, kernels = all_evidence(data, traces)
    if v100:
        of_v100 = next(part for part in kernels if part.device == "v100")
        others = [part for part in kernels if part.device != "v100"]
        print(medians(judge_v100(steps, others, of_v100, v100)))
        return
    parts = [
        *memory_errors(data),
        *step_time_errors(steps, kernels),
        *new_architecture_errors(steps, kernels),
    ]
    errors = pd.concat(parts, ignore_index=True)
    print(error_table(errors).to_string(), coverage(errors), sep="\n")
    if is_writing:
        evidence = [*(part.evidence for part in steps), *kernels]
        write_others(shipped(steps, kernels, errors), [source_of(part) for part in evidence])
        print(OTHERS_FILE)
