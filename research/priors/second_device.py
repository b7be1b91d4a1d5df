"""Step times of a V100 from few kernels and few steps (docs/research/step_time.md).

pycls' V100 steps in fp32 are judged after 0 to 100 V100 labels, with and without V100 kernels: from
what other devices have in common, from an A100's constants, and from the specification alone.
Judged architectures are held out of all devices' steps.
Evidence: timm's training steps on an RTX 3090, pytorch-gpu-benchmark's steps of seven cards,
NeuSight's kernels of three.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from research.data import data_folder
from research.held_out import held_out, percent_errors
from research.priors import IsWriting
from research.priors.joint_fit import Evidence, SharedPrior, write
from research.priors.kernel_sources import published_kernels
from research.priors.steps import (
    TRACES,
    PublishedSteps,
    Traces,
    learned_from,
    node_sheet_steps,
    some_timm_steps,
)
from trappm.learner.physics.step_time import StepTimePrior
from trappm.profiler.devices.catalogue import most_similar
from trappm.profiler.records import Phase

KERNEL_CARDS = ("a100-pcie-40gb", "a100-pcie-80gb", "p100-pcie-16gb")
LABELS = (0, 5, 10, 30, 100)
SOURCE = "pycls"
NAMES = {Phase.TRAIN: "training", Phase.INFER: "inference"}


def _rows(start: str, prior: StepTimePrior, steps: PublishedSteps) -> list[dict[str, object]]:
    return [
        {"start": start, "phase": NAMES[phase], "error": percent_errors(logs).mean()}
        for phase, logs in steps.errors(prior).items()
    ]


def judge_v100(
    known: Sequence[PublishedSteps], kernels: Sequence[Evidence], of_v100: Evidence, seeds: int
) -> pd.DataFrame:
    """Return errors on pycls' V100 steps of held-out architectures by start, kernels and labels."""
    target = next(s for s in known if s.evidence.host.startswith(SOURCE))
    others = [s for s in known if s.evidence.device != target.evidence.device]
    spec = target.evidence.spec
    models = sorted({s.evidence.device for s in others})
    rows = []
    for seed in range(seeds):
        test = held_out(target.architectures, seed)
        unseen = target.architectures[test]
        fit = learned_from(
            [*(s.evidence.at(~np.isin(s.architectures, unseen)) for s in others), *kernels]
        )
        common = fit.of_another_device()
        a100 = replace(common, centre=fit.constants("a100"))
        order = np.random.default_rng(seed).permutation(np.flatnonzero(~test))
        for count in LABELS:
            drawn = np.zeros(len(test), dtype=np.bool_)
            drawn[order[:count]] = True
            labels = target.evidence.at(drawn)
            priors: dict[str, StepTimePrior] = {
                f"{kernel_text}, from {start}": SharedPrior.like_others(spec, constants, own)
                for start, constants in (("all devices", common), ("A100", a100))
                for kernel_text, own in (("", ()), (" and kernels", (of_v100,)))
            }
            similar = fit.constants(str(most_similar(target.evidence.device, models)))
            priors[", from the most similar card"] = StepTimePrior(
                spec, similar, between=priors[", from A100"].between
            )
            priors[", from the specification"] = StepTimePrior(spec)
            for start, prior in priors.items():
                fitted = prior.refit(labels.workloads, labels.log_values)
                name = f"{min(count, len(order))} labels{start}"
                rows += _rows(name, fitted, target.at(test))
        sys.stderr.write(f"seed {seed} is done\n")
    return pd.DataFrame(rows)


def medians(rows: pd.DataFrame) -> str:
    """Return the median over seeds by start and phase."""
    table = rows.pivot_table(
        index="start", columns="phase", values="error", aggfunc="median", sort=False
    )
    return table.round(1).to_string()


def main(
    traces: Traces = TRACES,
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 0 on.")] = 5,
    is_writing: IsWriting = False,
) -> None:
    """Print the median errors in percent, or fit and write the shipped constants."""
    data = data_folder()
    nodes = data / "nodes"
    known = [*node_sheet_steps(nodes, traces), some_timm_steps("train", data, traces)]
    kernels = [published_kernels(nodes, card) for card in KERNEL_CARDS]
    if is_writing:
        evidence = [*(steps.evidence for steps in known), *kernels]
        # The shipped snapshot has heads of these two, which are judged on the same labels.
        fit = learned_from(part for part in evidence if part.device not in {"a100", "v100"})
        write(fit.of_another_device())
        return
    of_v100 = published_kernels(nodes, "v100-pcie-32gb")
    print(medians(judge_v100(known, kernels, of_v100, seeds)))
