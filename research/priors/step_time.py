"""Errors of simulated step times on timm's published labels (docs/research/rtx_step_time.md,
docs/research/step_time_constants.md).

Each seed holds out a fifth of the architectures (or of the families). With --head, the whole head
with residual and interval is evaluated in addition to the prior.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import typer

from research.data import data_folder
from research.held_out import Array, Chosen, held_out, percent_errors
from research.priors.steps import TIMM, TRACES, Steps, Traces, timm_steps
from trappm.learner.estimator import Targets
from trappm.learner.heads.metric_head import Head, Ours
from trappm.learner.physics.prior import TRANSFER_TIGHTNESS, Prior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.stats.folds import content_groups
from trappm.profiler.models.families import family_of

FIRST_SEED = 1337
TRANSFER_LABELS = (0, 10, 32, 100, 300)
IsHead = Annotated[bool, typer.Option("--head", help="Evaluate residual and interval as well.")]
SeedCount = Annotated[int, typer.Option("--seeds", help="Number of seeds, from 1337 on.")]


def fit_head(
    steps: Steps, chosen: Chosen, prior: Prior, seed: int, start: Head[Prior] | None = None
) -> Head[Prior]:
    """Train a head on the chosen rows, its folds divided by architecture."""
    some = steps.evidence.at(chosen)
    values = np.exp(some.log_values)
    targets = Targets(values, np.full(len(values), np.nan), steps.groups[chosen].tolist())
    return Ours(prior).fit(some.workloads, targets, np.random.default_rng(seed), start)


def groups_of(steps: Steps, split: str) -> npt.NDArray[np.str_]:
    """Return the group that each row is held out with: its architecture or its family."""
    if split == "families":
        return np.array([family_of(name) for name in steps.architectures.tolist()])
    return steps.groups


def error_row(seed: int, variant: str, measured: Array, log_predicted: Array) -> dict[str, object]:
    off = percent_errors(np.log(measured) - log_predicted)
    return {"variant": variant, "seed": seed, "mean_%": off.mean(), "median_%": np.median(off)}


def judge(steps: Steps, split: str, seeds: range, head: bool) -> pd.DataFrame:
    """Return errors on held-out rows without labels, with fitted constants and of the head."""
    start = StepTimePrior(steps.evidence.spec)
    groups = groups_of(steps, split)
    rows = []
    for seed in seeds:
        test = held_out(groups, seed)
        unseen, known = steps.evidence.at(test), steps.evidence.at(~test)
        measured = np.exp(unseen.log_values)
        priors: dict[str, Prior] = {"from the specification": start}
        if head:
            fitted = fit_head(steps, ~test, start, seed)
            priors["fitted"] = fitted.prior
            estimate = fitted.predict(unseen.workloads)
            row = error_row(seed, "with residual", measured, np.log(estimate.median))
            inside = (estimate.low <= measured) & (measured <= estimate.high)
            rows.append(row | {"covered_%": 100 * np.mean(inside)})
        else:
            priors["fitted"] = start.refit(known.workloads, known.log_values)
        rows += [
            error_row(seed, name, measured, prior.log_values(unseen.workloads))
            for name, prior in priors.items()
        ]
    return pd.DataFrame(rows)


def transfer(old: Steps, new: Steps, seeds: range, head: bool) -> pd.DataFrame:
    """Return errors on a new card after k labels, from the old card's constants and from scratch.

    Old labels of the held-out architectures are not used either.
    """
    names = [*old.architectures.tolist(), *new.architectures.tolist()]
    groups = np.array(content_groups(names, [*old.evidence.workloads, *new.evidence.workloads]))
    of_old, of_new = np.split(groups, [len(old.architectures)])
    plain = StepTimePrior(new.evidence.spec)
    rows = []
    for seed in seeds:
        test = held_out(of_new, seed)
        unseen, measured = new.evidence.at(test).workloads, new.step_time_ms[test]
        known = ~np.isin(of_old, of_new[test])
        first, of_known = StepTimePrior(old.evidence.spec), old.evidence.at(known)
        source = first.refit(of_known.workloads, of_known.log_values)
        old_head = fit_head(old, known, first, seed) if head else None
        moved = plain.started_from(source)
        order = np.random.default_rng(seed).permutation(np.flatnonzero(~test))
        for count in TRANSFER_LABELS:
            drawn = np.zeros(len(test), dtype=np.bool_)
            drawn[order[:count]] = True
            some = new.evidence.at(drawn)
            fits = {
                "from the old device": moved.refit(
                    some.workloads, some.log_values, tightness=TRANSFER_TIGHTNESS
                ),
                "from the specification": plain.refit(some.workloads, some.log_values),
            }
            logs = {name: prior.log_values(unseen) for name, prior in fits.items()}
            if head:
                for name, begin in (
                    ("head from the old device", old_head),
                    ("head from scratch", None),
                ):
                    fitted = fit_head(new, drawn, plain, seed, begin)
                    logs[name] = np.log(fitted.predict(unseen).median)
            rows += [
                error_row(seed, f"{count} labels, {name}", measured, values)
                for name, values in logs.items()
            ]
    return pd.DataFrame(rows)


def main(
    traces: Traces = TRACES,
    labels: Annotated[str, typer.Option(help=f"Sheet: {', '.join(TIMM)}.")] = "train",
    split: Annotated[
        Literal["architectures", "families"], typer.Option(help="Held-out groups.")
    ] = "architectures",
    is_transfer: Annotated[
        bool, typer.Option("--transfer", help="Transfer inference from RTX 3090 to 4090.")
    ] = False,
    head: IsHead = False,
    seeds: SeedCount = 5,
) -> None:
    """Print the mean over seeds of the mean and median errors on held-out labels."""
    data, chosen = data_folder(), range(FIRST_SEED, FIRST_SEED + seeds)
    if is_transfer:
        old, new = (timm_steps(name, data, traces) for name in ("infer-3090", "infer-4090"))
        table = transfer(old, new, chosen, head)
    else:
        steps = timm_steps(labels, data, traces)
        print(f"{len(steps.architectures)} steps of {steps.evidence.device}")
        table = judge(steps, split, chosen, head)
    means = table.drop(columns="seed").groupby("variant", sort=False).mean()
    print(means.round(2).to_string())
