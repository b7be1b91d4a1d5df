"""Constants and errors of text generation (docs/research/step_time.md).

Labels: optimum-benchmark's runs of Llama-2-7B on an A100 80 GB (Apache-2.0), of which 512 tokens
follow prompts of 256. Only weights in fp16 are used: GPTQ's are not predicted. With one model, the
rows held out are those of a batch size or of an implementation of attention.
"""

from __future__ import annotations

from itertools import product
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from research.data import data_folder
from trappm.extensions.transformers.decoder import Decoder
from trappm.extensions.transformers.generation import GenerationFactors, step_times_ms
from trappm.learner.interface import Z90
from trappm.profiler.records import Precision

DEVICE, PROMPT, TOKENS = "a100-80gb", 256, 512
NAMES = {
    "fp16": "hf:llama-2-7b,eager",
    "fp16+bt": "hf:llama-2-7b",
    "fp16+fa2": "hf:llama-2-7b",
}
"""Names by experiment; BetterTransformer and FlashAttention 2 both fuse attention."""
HOSTS_US = np.arange(14.0, 23.0)
FACTORS = np.arange(1.2, 2.22, 0.04).round(2)
STEPS = ("prompt", "token")
MODELS_APART = {"prompt": 0.044, "token": 0.0}
"""Deviation of the logarithm between models, which one model's rows do not show. A prompt is a
forward pass: training steps of held-out language models are 3.5 % off on average
(docs/research/step_time.md). Most of a token's time is that of reading weights and cache."""


def read_steps() -> pd.DataFrame:
    """Return experiment, batch size, and ms of the prompt and of a later token."""
    sheet = pd.read_csv(data_folder() / "new" / "llama2_generate_a100_80gb.csv.gz")
    sheet = sheet[sheet["Experiment Name"].isin(NAMES)]
    return pd.DataFrame(
        {
            "experiment": sheet["Experiment Name"],
            "batch": sheet["Per Process Batch Size"],
            "prompt": 1000 * sheet["Prefill Latency (s)"],
            "token": sheet.ms_per_token,
        }
    ).reset_index(drop=True)


def predicted(rows: pd.DataFrame) -> np.ndarray:
    """Return the ms of each host time and factor, shape (hosts, factors, rows, steps)."""
    table = np.zeros((len(HOSTS_US), len(FACTORS), len(rows), len(STEPS)))
    for (name, batch), group in rows.groupby([rows.experiment.map(NAMES), "batch"]):
        decoder = Decoder(name, PROMPT + TOKENS, batch, Precision.BF16)
        steps = [decoder.prefill(PROMPT)]
        steps += [decoder.decode(context) for context in (PROMPT, PROMPT + TOKENS - 2)]
        kernels = [step.kernels for step in steps]
        for (i, host_us), (j, factor) in product(enumerate(HOSTS_US), enumerate(FACTORS)):
            factors = GenerationFactors(host_us, products=factor, copies=factor)
            times, *_ = step_times_ms(kernels, batch, DEVICE, Precision.BF16, factors)
            table[i, j, group.index] = times[0], times[1:].mean()
    return table


def fitted(errors: np.ndarray) -> tuple[int, int, int]:
    """Return the indices of host time and factors (prompt, token) of the least squares.

    Args:
        errors: Logarithms of measured / predicted, shape (hosts, factors, rows, steps).
    """
    squares = (errors**2).sum(2)
    host, token = np.unravel_index(squares[..., 1].argmin(), squares.shape[:2])
    return int(host), int(squares[host, :, 0].argmin()), int(token)


def held_out(errors: np.ndarray, groups: pd.Series) -> np.ndarray:
    """Return the errors of each group by the fit to all others, shape (rows, steps)."""
    result = np.zeros(errors.shape[2:])
    for group in groups.unique():
        own = (groups == group).to_numpy()
        host, *factors = fitted(errors[:, :, ~own])
        for step, factor in enumerate(factors):
            result[own, step] = errors[host, factor, own, step]
    return result


def main(
    fit: Annotated[bool, typer.Option("--fit", help="Print the constants only.")] = False,
) -> None:
    """Print the constants of generation and their errors on held-out rows."""
    rows = read_steps()
    errors = np.log(rows[list(STEPS)].to_numpy() / predicted(rows))
    host, prompt, token = fitted(errors)
    print(GenerationFactors(HOSTS_US[host], FACTORS[prompt], FACTORS[token]))
    batches = held_out(errors, rows.batch)
    for name, own in zip(STEPS, batches.T, strict=True):
        bounds = np.quantile(own, (0.05, 0.95))
        bounds = np.sign(bounds) * np.hypot(bounds, Z90 * MODELS_APART[name])
        print(f"{name.upper()}_ERRORS", np.exp(bounds).round(3))
    if fit:
        return
    for name, own in (("batch", batches), ("experiment", held_out(errors, rows.experiment))):
        percent = 100 * np.abs(np.expm1(-own))
        print(f"held out by {name}: mean, largest %", percent.mean(0).round(1), percent.max(0))
    print(rows.assign(**{f"{n}_%": 100 * np.expm1(-batches[:, i]) for i, n in enumerate(STEPS)}))
