"""Errors of predicted training times of language models (docs/research/step_time.md).

Learned constants are judged on held-out models: each model's rows by a fit to all other models.
"""

from __future__ import annotations

from math import exp
from statistics import median
from typing import Annotated

import pandas as pd
import typer

from research.data import data_folder
from research.priors import llm_foundry, neusight_models
from research.priors.kernel_sources import flash_attention, large_products
from trappm.learner.heads.physics_heads import known_of_others
from trappm.learner.physics.step_time import StepTimePrior


def error_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the errors of each group in percent.

    Args:
        rows: Predictions with the columns `group`, `model`, `measured`, `predicted`, `low` and
            `high`; the last two are NaN where no interval is stated.
    """
    rows = rows.assign(
        error=100 * (rows.predicted / rows.measured - 1).abs(),
        covered=rows.measured.between(rows.low, rows.high).where(rows.low.notna()),
    )
    groups = rows.groupby("group", sort=False)
    return pd.DataFrame(
        {
            "rows": groups.size(),
            "models": groups.model.nunique(),
            "mean_%": groups.error.mean().round(1),
            "median_%": groups.error.median().round(1),
            "within_10_%": groups.error.apply(lambda error: 100 * (error <= 10).mean()).round(0),
            "covered_%": (100 * groups.covered.mean().astype(float)).round(0),
        }
    )


def by_kernels() -> str:
    """Return the factors that single kernels of today's libraries imply for an A100."""
    data, card = data_folder(), "a100-sxm4-80gb"
    factors = {}
    kinds = {"products": large_products(data, card), "attention": flash_attention(data, card)}
    for name, kernels in kinds.items():
        plain = StepTimePrior(kernels.spec, known_of_others()[0].constants_of("a100-80gb"))
        factors[name] = exp(median(kernels.log_values - plain.log_values(kernels.workloads)))
    return "a100: kernels, " + ", ".join(f"{name}={f:.3f}" for name, f in factors.items())


def main(
    details: Annotated[bool, typer.Option("--details", help="Print every row as well.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Print the constants of all rows.")] = False,
) -> None:
    """Print the errors on llm-foundry's and NeuSight's published steps."""
    nodes = data_folder() / "nodes"
    training = pd.read_csv(nodes / "llm_training.csv")
    foundry = training[training.source == llm_foundry.SOURCE]
    whole_models = neusight_models.predicted(pd.read_csv(nodes / "neusight_llm_e2e_fp32.csv"))
    if fit:
        print(llm_foundry.fitted(foundry))
        print(by_kernels())
        print(neusight_models.fitted(whole_models))
    rows = pd.concat([llm_foundry.predicted(foundry), whole_models], ignore_index=True)
    if details:
        print(rows.to_string(index=False))
    print(error_table(rows).to_string(na_rep="-"))
