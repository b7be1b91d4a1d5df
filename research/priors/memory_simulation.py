"""Errors of simulated memory against measured A100 memory (docs/research/memory.md).

Traces each architecture of the published sheet once; replays the traces at the measured batch
sizes; fits two coefficients, `c0 + c1 * reserved`, on half of the architectures (or families), and
prints the errors on the other half: usable rows, spikes included, and both halves in turn. `--fit`
searches the constants of `replay.WORKSPACE_SHARE` on the first half of the architectures
instead, so the errors of the second half are of architectures that had no part in them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from research.data import data_folder
from research.held_out import robust_line
from research.priors.steps import TRACES, Traces, cached_step
from trappm.profiler.memory.simulation import WORKSPACE_SHARE, LoopPreset, simulate_memory
from trappm.profiler.models.families import family_of
from trappm.profiler.models.zoo import native_input_size
from trappm.profiler.records import Optimizer
from trappm.profiler.traced_step import Allocations, ConvolutionKind, Pass, TraceKey

BATCH_SIZES = (8, 16, 32, 64, 128)
COLUMNS = ["faketensor_mib", "live_mib", "reserved_mib", "reserved_with_workspace_mib"]
PREDICTED = "reserved_with_workspace_mib"
FLOOR = 0.005
"""Smallest relative error that weights of the fitted line are divided by."""
MAX_PERCENT = 30
"""Errors count at most this much in the search of workspaces, which cannot explain spikes."""


def allocations_of(architecture: str, traces: Path) -> Allocations | None:
    """Return the allocations of an architecture's step, traced once, or None."""
    import torch

    torch.set_num_threads(1)
    step = cached_step(TraceKey(architecture, native_input_size(architecture) or 224), traces)
    return None if step is None else step.allocations


def can_be_traced(architecture: str, traces: Path) -> bool:
    """Trace the step of an architecture unless it is cached; return whether it succeeded."""
    return allocations_of(architecture, traces) is not None


def simulate(
    architecture: str, traces: Path, shares: Mapping[int, float] = WORKSPACE_SHARE
) -> pd.DataFrame:
    """Return the simulated memory of one architecture by batch size."""
    step = allocations_of(architecture, traces)
    assert step is not None
    loop = LoopPreset.TUNED.with_optimizer(Optimizer.SGD)
    simulated = [simulate_memory(step, b, loop, workspace_share=shares) for b in BATCH_SIZES]
    values = {name: [getattr(memory, name) for memory in simulated] for name in COLUMNS[1:]}
    return pd.DataFrame({"architecture": architecture, "batch_size": BATCH_SIZES, **values})


def in_first_half(names: pd.Series) -> np.ndarray:
    """Return a mask of the rows in one half of all names, by a checksum of the name."""
    return names.map(lambda name: zlib.crc32(name.encode()) % 2 == 0).to_numpy()


def errors(table: pd.DataFrame, column: str, first: np.ndarray) -> dict[str, object]:
    """Return relative errors in percent, fitted on each half and evaluated on the other."""
    simulated, measured = table[column].to_numpy(), table.max_gpu_memory_mib.to_numpy()
    off, coefficients = np.zeros(len(table)), []
    for judged in (first, ~first):
        c0, c1 = robust_line(simulated[~judged], measured[~judged], FLOOR)
        off[judged] = 100 * np.abs((c0 + c1 * simulated) / measured - 1)[judged]
        coefficients.append(f"{c0:.1f} + {c1:.4f} x")
    return {
        "mape": round(off.mean(), 2),
        "median_ape": round(np.median(off), 2),
        "mape_without_spikes": round(off[table.spike.to_numpy() == 0].mean(), 2),
        "mape_second_half": round(off[~first].mean(), 2),
        "median_ape_second_half": round(np.median(off[~first]), 2),
        "fits": "; ".join(coefficients),
    }


def search_shares(evaluate: Callable[[Mapping[int, float]], float]) -> dict[int, float]:
    """Search workspace shares by coordinate descent over kinds and passes, on a coarse grid.

    Depthwise convolutions are left out: in fp32 PyTorch runs them itself, without scratch memory.
    """
    shares: dict[int, float] = {}
    best = evaluate(shares)
    for kind in (ConvolutionKind.DENSE, ConvolutionKind.POINTWISE, ConvolutionKind.GROUPED):
        for which in (Pass.DATA_GRADIENT, Pass.WEIGHT_GRADIENT, Pass.FORWARD):
            start = shares
            for share in (0.25, 0.5, 1.0, 1.5, 2.0):
                tried = start | {kind * 3 + which: share}
                loss = evaluate(tried)
                print(kind.name, which.name, share, round(loss, 3), flush=True)
                if loss < best - 0.005:
                    best, shares = loss, tried
    return shares


def main(
    traces: Traces = TRACES,
    fit: Annotated[bool, typer.Option("--fit", help="Search the workspace shares.")] = False,
    processes: Annotated[int, typer.Option(help="Number of processes.")] = 2,
) -> None:
    """Print the errors of each column of the simulation, or the fitted workspace shares."""
    data = data_folder()
    sheet = pd.read_csv(data / "a100_40gb_train_memory.csv")
    sheet = sheet.merge(pd.read_csv(data / "a100_40gb_train_memory_quality.csv"))
    names = np.array(sorted(sheet.architecture.unique()))
    with ProcessPoolExecutor(processes) as pool:
        is_traced = list(pool.map(partial(can_be_traced, traces=traces), names, chunksize=4))

        def simulated(
            rows: pd.DataFrame, shares: Mapping[int, float] = WORKSPACE_SHARE
        ) -> pd.DataFrame:
            tasks = rows.architecture.unique()
            parts = pool.map(partial(simulate, traces=traces, shares=shares), tasks, chunksize=4)
            return pd.concat(parts).merge(rows)

        sheet = sheet[(sheet["class"] == "usable") & sheet.architecture.isin(names[is_traced])]
        if fit:
            half = sheet[in_first_half(sheet.architecture)]

            def evaluate(shares: Mapping[int, float]) -> float:
                rows = simulated(half, shares)
                values, measured = rows[PREDICTED].to_numpy(), rows.max_gpu_memory_mib.to_numpy()
                c0, c1 = robust_line(values, measured, FLOOR)
                off = 100 * np.abs((c0 + c1 * values) / measured - 1)
                return float(np.minimum(off, MAX_PERCENT).mean())

            shares = search_shares(evaluate)
            print({f"{ConvolutionKind(k // 3).name} {Pass(k % 3).name}": shares[k] for k in shares})
            return
        usable = simulated(sheet)
    print(f"{sum(is_traced)} of {len(names)} architectures traced, {len(usable)} rows judged")
    for title, values in (
        ("architectures", usable.architecture),
        ("families", usable.architecture.map(family_of)),
    ):
        half = in_first_half(values)
        table = pd.DataFrame({column: errors(usable, column, half) for column in COLUMNS}).T
        print(f"\n{title} held out\n{table.to_string()}")
