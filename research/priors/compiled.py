"""Errors of predicted inference steps under `torch.compile`, on timm's published pairs.

Each seed holds out a fifth of the architectures of one card, whose other eager labels fit the
card's constants. The ratio to the eager step is learned from pairs of the other architectures, on
this card or on the other one (docs/research/step_time.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pandas as pd
import typer

from research.data import data_folder
from research.held_out import Array, held_out, percent_errors
from research.priors import IsWriting
from research.priors.steps import (
    PAIRS_CARDS,
    PAIRS_FILE,
    TRACES,
    PublishedSteps,
    Traces,
    kernels,
)
from trappm.learner.interface import Workload
from trappm.learner.physics.compiled_step import (
    REFERENCE,
    CompiledStep,
    family_offsets,
    part_times,
    save_reference,
)
from trappm.learner.physics.step_time import StepTimePrior
from trappm.profiler.models.families import family_of
from trappm.profiler.models.zoo import current_name
from trappm.profiler.records import Execution, Graph, Optimizer, Phase, Precision
from trappm.profiler.traced_step import StepKernels, TraceKey, TraceSettings

MAX_EAGER_ERROR = 0.25
"""Log error of the eager prior above which a pair neither teaches nor judges a ratio: timm runs
such models otherwise than by default (reparameterized, or without a cache of positions)."""
FEW = (5, 20, 50, 200)
"""Numbers of pairs of a card from which the constants of the other card are refitted."""
PRECISION = Precision.AMP_FP16
"""Precision of the sheet."""


def inference_kernels(
    name: str, size: int, traces: Path
) -> tuple[StepKernels | None, StepKernels | None]:
    """Return the kernels of the eager and the compiled step; None if they cannot be traced."""
    eager, compiled = (
        kernels(
            TraceKey(name, size, TraceSettings(PRECISION, execution=execution), Phase.INFER), traces
        )
        for execution in (Execution.EAGER, Execution.COMPILE)
    )
    return eager, compiled


def pairs(path: Path, most: int | None = None) -> pd.DataFrame:
    """Return the rows measured eager and compiled in one configuration, in random order.

    Args:
        path: The sheet.
        most: Largest number of inputs of a family, as drawn of the first card (default: all).
    """
    sheet = pd.read_csv(path)
    keys = ["device", "precision", "torch", "model", "infer_img_size", "infer_batch_size"]
    first = sheet.groupby([*keys, "compiled"]).infer_step_time.median().unstack("compiled")
    both = first.dropna().rename(columns={False: "eager_ms", True: "compiled_ms"}).reset_index()
    both = both.sample(frac=1, random_state=0)
    if most is None:
        return both
    first = both[both.device == PAIRS_CARDS[REFERENCE]]
    families = first.model.map(lambda name: family_of(current_name(name)))
    drawn = first[first.groupby(families).cumcount() < most]
    return both.merge(drawn[["model", "infer_img_size"]].drop_duplicates())


@dataclass(frozen=True, eq=False)
class CardPairs:
    """Pairs of one card (n rows)."""

    eager: PublishedSteps
    compiled: PublishedSteps

    @classmethod
    def of(cls, card: str, table: pd.DataFrame, traces: Path) -> CardPairs:
        """Return the pairs whose kernels are in the folder or can be traced."""
        rows: tuple[list[tuple[Workload, str, float]], ...] = [], []
        for row in table[table.device == PAIRS_CARDS[card]].to_dict("records"):
            name = current_name(str(row["model"]))
            both = inference_kernels(name, int(row["infer_img_size"]), traces)
            times = row["eager_ms"], row["compiled_ms"]
            if None in both:
                continue
            for steps, own, time_ms in zip(rows, both, times, strict=True):
                workload = Workload(
                    graph=Graph.empty(int(row["infer_batch_size"])),
                    precision=PRECISION,
                    optimizer=Optimizer.MOMENTUM,
                    phase=Phase.INFER,
                    kernels=own,
                )
                steps.append((workload, name, time_ms))
        return cls(*(PublishedSteps.of(card, f"timm {card}", steps) for steps in rows))

    def at(self, chosen: npt.NDArray[np.bool_]) -> CardPairs:
        return CardPairs(self.eager.at(chosen), self.compiled.at(chosen))

    def parts(self, prior: StepTimePrior) -> Array:
        return part_times(prior, self.compiled.evidence.workloads)

    @cached_property
    def eager_prior(self) -> StepTimePrior:
        """Prior with constants of the eager labels."""
        evidence = self.eager.evidence
        return StepTimePrior(evidence.spec).refit(evidence.workloads, evidence.log_values)

    @property
    def log_ratios(self) -> Array:
        values: Array = self.compiled.evidence.log_values - self.eager.evidence.log_values
        return values


def judge(card: CardPairs, reference: CardPairs, seed: int) -> list[dict[str, object]]:
    """Return errors on held-out architectures of a card.

    Args:
        card: Pairs of the card; its compiled labels only judge, unless it is the reference.
        reference: Card whose pairs of the other architectures teach the ratios.
        seed: Seed of the held-out architectures.
    """
    test = held_out(card.eager.groups, seed)
    known, unseen = card.at(~test), card.at(test)
    prior = known.eager_prior
    pairs = reference.at(~np.isin(reference.eager.architectures, unseen.eager.architectures))
    first = prior if reference is card else pairs.eager_prior
    of_eager = first.log_values(pairs.eager.evidence.workloads)
    like = np.abs(of_eager - pairs.eager.evidence.log_values) < MAX_EAGER_ERROR
    step = CompiledStep.unknown().refit(
        pairs.parts(first)[like], (of_eager + pairs.log_ratios)[like]
    )
    families = [family_of(name) for name in pairs.eager.architectures.tolist()]
    by_family = pd.Series(pairs.log_ratios).groupby(families).median()
    middle = float(np.median(pairs.log_ratios))
    own = [family_of(name) for name in unseen.eager.architectures.tolist()]
    eager = prior.log_values(unseen.eager.evidence.workloads)
    unseen_parts, unseen_eager = (
        unseen.parts(first), first.log_values(unseen.eager.evidence.workloads)
    )  # fmt: skip
    ratios = {
        "eager answer": np.zeros(len(eager)),
        "times one ratio": np.full(len(eager), middle),
        "times the family's ratio": by_family.reindex(own).fillna(middle).to_numpy(),
        "fused kernels alone": step.log_times(unseen_parts) - unseen_eager,
    }
    errors = pairs.log_ratios - (step.log_times(pairs.parts(first)) - of_eager)
    offsets = family_offsets(errors[like], np.array(families)[like].tolist())
    of_families = np.array([offsets.get(name, 0.0) for name in own])
    ratios["fused kernels"] = ratios["fused kernels alone"] + of_families
    if reference is not card:
        own_eager = first.log_values(known.eager.evidence.workloads)
        like = np.abs(prior.log_values(known.eager.evidence.workloads)
                      - known.eager.evidence.log_values) < MAX_EAGER_ERROR  # fmt: skip
        order = np.random.default_rng(seed).permutation(np.flatnonzero(like))
        own_parts, own_times = known.parts(first), own_eager + known.log_ratios
        for count in FEW:
            few = order[:count]
            known_families = [family_of(name) for name in known.eager.architectures[few].tolist()]
            others = np.array([offsets.get(name, 0.0) for name in known_families])
            refitted = step.refit(own_parts[few], own_times[few] - others)
            errors = own_times[few] - others - refitted.log_times(own_parts[few])
            more = family_offsets(errors, known_families)
            ratios[f"fused kernels, {count} own pairs"] = (
                refitted.log_times(unseen_parts)
                - unseen_eager
                + of_families
                + np.array([more.get(name, 0.0) for name in own])
            )
            ratios[f"median of {count} own pairs"] = np.full(
                len(eager), np.median(known.log_ratios[few])
            )
    rows = []
    like = np.abs(eager - unseen.eager.evidence.log_values) < MAX_EAGER_ERROR
    for name, log_ratio in ratios.items():
        off = percent_errors(unseen.compiled.evidence.log_values - eager - log_ratio)
        of_ratio = percent_errors(unseen.log_ratios - log_ratio)[like]
        rows.append(
            {
                "variant": name,
                "step_mean_%": off.mean(),
                "step_median_%": np.median(off),
                "ratio_mean_%": of_ratio.mean(),
                "ratio_median_%": np.median(of_ratio),
                "eager_mean_%": percent_errors(unseen.eager.evidence.log_values - eager).mean(),
            }
        )
    return rows


def fit_and_write(reference: CardPairs) -> None:
    """Write the constants of the reference's eager steps and of its compiled ones."""
    prior = reference.eager_prior
    eager = prior.log_values(reference.eager.evidence.workloads)
    like = np.abs(eager - reference.eager.evidence.log_values) < MAX_EAGER_ERROR
    step = CompiledStep.unknown().refit(
        reference.parts(prior)[like], (eager + reference.log_ratios)[like]
    )
    predicted = step.log_times(reference.parts(prior)) - eager
    families = [family_of(name) for name in reference.eager.architectures[like].tolist()]
    offsets = family_offsets((reference.log_ratios - predicted)[like], families)
    save_reference(prior, step, offsets)


def main(
    traces: Traces = TRACES,
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 1337 on.")] = 5,
    most: Annotated[
        int | None, typer.Option(help="Largest number of inputs of a family (default: all).")
    ] = None,
    is_writing: IsWriting = False,
) -> None:
    """Print mean errors over seeds, for each card with its own ratios and with the other's, or
    fit and write the constants of the reference.
    """
    table = pairs(data_folder() / PAIRS_FILE, most)
    if is_writing:
        fit_and_write(CardPairs.of(REFERENCE, table, traces))
        return
    cards = {card: CardPairs.of(card, table, traces) for card in PAIRS_CARDS}
    for name, card in cards.items():
        for key, reference in cards.items():
            rows = [
                row for seed in range(1337, 1337 + seeds) for row in judge(card, reference, seed)
            ]
            print(f"{name}: {len(card.eager.architectures)} pairs, ratios of {key}")
            means = pd.DataFrame(rows).groupby("variant", sort=False).mean()
            print(means.round(2).to_string())
