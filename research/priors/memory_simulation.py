"""How well simulated memory meets measured A100 memory, and what it costs to simulate.

    python research/priors/memory_simulation.py ../shared/data --traces FILE [--unseen N]
        [--fit]

Traces each architecture of the published sheet (see that folder's README) into FILE, which a later
call goes on with; replays the traces at the measured batch sizes; fits two coefficients, `c0 + c1 *
reserved`, on half of the architectures (or families), and reports errors on the other half: usable
rows, spikes included, and both halves in turn. `--fit` looks for the constants of
`memory_simulation.WORKSPACE_SHARE` on the first half of the architectures instead, so the figures
named `second_half` are of architectures that had no part in them.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from trappm.profiler.models.families import family_of
from trappm.profiler.records import Optimizer
from trappm.profiler.simulation.memory_simulation import WORKSPACE_SHARE, simulate_memory
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.profiler.simulation.step_trace import ConvolutionKind, Pass
from trappm.profiler.simulation.training_loop import Loop

SEED = 1337
COLUMNS = ("faketensor_mib", "live_mib", "reserved_mib", "reserved_with_workspace_mib")
PREDICTED = "reserved_with_workspace_mib"


def trace(architecture: str) -> dict[str, object]:
    """One line of the file of traces."""
    import torch

    from trappm.profiler.errors import TrappmError
    from trappm.profiler.models.zoo import native_input_size
    from trappm.profiler.static_profile import step_profile

    torch.set_num_threads(1)
    started = time.process_time()
    try:
        profile = step_profile(architecture, native_input_size(architecture) or 224)
    except TrappmError as error:
        return {"architecture": architecture, "refusal": str(error)}
    return {
        "architecture": architecture,
        "traced_s": time.process_time() - started,
        "profile": base64.b85encode(profile.to_bytes()).decode(),
    }


def read_traces(path: Path) -> list[dict[str, str]]:
    """The whole lines of the file; the last may have been cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def collect(names: Iterable[str], path: Path, processes: int) -> pd.DataFrame:
    """Traces what the file does not have yet, and returns what it has of these names."""
    known = read_traces(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in known))
    done = {row["architecture"] for row in known}
    with ProcessPoolExecutor(processes) as pool, path.open("a") as file:
        for row in pool.map(trace, [name for name in names if name not in done]):
            file.write(json.dumps(row) + "\n")
            file.flush()
    return pd.DataFrame([row for row in read_traces(path) if row["architecture"] in set(names)])


def simulate(
    task: tuple[str, str, tuple[int, ...]], shares: Mapping[int, float] = WORKSPACE_SHARE
) -> list[dict[str, object]]:
    """The simulated memory of one architecture at some batch sizes."""
    architecture, profile, batch_sizes = task
    step = StepProfile.from_bytes(base64.b85decode(profile)).trace
    started = time.process_time()
    loop = Loop.TUNED.with_optimizer(Optimizer.SGD)
    simulated = {b: simulate_memory(step, b, loop, workspace_share=shares) for b in batch_sizes}
    replayed_s = (time.process_time() - started) / len(batch_sizes)
    return [
        {
            "architecture": architecture,
            "batch_size": batch_size,
            "replayed_s": replayed_s,
            **{column: getattr(memory, column) for column in COLUMNS[1:]},
        }
        for batch_size, memory in simulated.items()
    ]


def fit(simulated: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """c0 and c1 with the least absolute relative error, by iteratively reweighted least squares."""
    terms = np.stack([np.ones_like(simulated), simulated], axis=1)
    weights = 1 / measured
    for _ in range(50):
        scaled = terms * weights[:, None]
        constants = np.linalg.lstsq(scaled, measured * weights, rcond=None)[0]
        gaps = np.abs(terms @ constants - measured) / measured
        weights = 1 / measured / np.sqrt(np.maximum(gaps, 0.005))
    return constants


def in_first_half(values: pd.Series) -> np.ndarray:
    """Which rows belong to one half of all architectures or families, by a checksum of the name."""
    return values.map(lambda name: zlib.crc32(name.encode()) % 2 == 0).to_numpy()


def errors(table: pd.DataFrame, column: str, first: np.ndarray) -> dict[str, object]:
    """Relative errors in percent: fitted on either half, judged on the other."""
    simulated, measured = table[column].to_numpy(), table.max_gpu_memory_mib.to_numpy()
    off, coefficients = np.zeros(len(table)), []
    for judged in (first, ~first):
        c0, c1 = fit(simulated[~judged], measured[~judged])
        off[judged] = np.abs((c0 + c1 * simulated - measured) / measured)[judged] * 100
        coefficients.append([round(float(c0), 1), round(float(c1), 4)])
    plain = off[table.spike.to_numpy() == 0]
    return {
        "mape": round(float(off.mean()), 2),
        "median_ape": round(float(np.median(off)), 2),
        "mape_without_spikes": round(float(plain.mean()), 2),
        "mape_second_half": round(float(off[~first].mean()), 2),
        "median_ape_second_half": round(float(np.median(off[~first])), 2),
        "c0_mib_c1": coefficients,
    }


def look_for_shares(evaluate: Callable[[Mapping[int, float]], float]) -> dict[int, float]:
    """Coordinate descent over kinds and passes of convolutions, on a coarse grid.

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


def fit_shares(table: pd.DataFrame, tasks: list[tuple[str, str, tuple[int, ...]]],
               pool: ProcessPoolExecutor) -> None:  # fmt: skip
    """Prints workspace shares fitted on the first half of the architectures."""
    train = table[in_first_half(table.architecture)]
    chosen = [task for task in tasks if task[0] in set(train.architecture)]

    def evaluate(shares: Mapping[int, float]) -> float:
        parts = pool.map(partial(simulate, shares=shares), chosen, chunksize=4)
        rows = pd.DataFrame([row for rows in parts for row in rows])
        merged = rows[["architecture", "batch_size", PREDICTED]].merge(
            train.drop(columns=PREDICTED)
        )
        simulated, measured = merged[PREDICTED].to_numpy(), merged.max_gpu_memory_mib.to_numpy()
        c0, c1 = fit(simulated, measured)
        off = np.abs(c0 + c1 * simulated - measured) / measured * 100
        return float(np.minimum(off, 30).mean())  # spikes are not to be explained

    shares = look_for_shares(evaluate)
    print({f"{ConvolutionKind(k // 3).name} {Pass(k % 3).name}": s for k, s in shares.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--traces", type=Path, required=True, help="file to keep traces in")
    parser.add_argument("--limit", type=int, help="so many architectures, drawn at random")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument(
        "--unseen", type=int, default=0, metavar="N", help="leave out the first N of those drawn"
    )
    parser.add_argument("--fit", action="store_true", help="look for the workspace shares")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    sheet = pd.read_csv(arguments.data / "a100_40gb_train_memory.csv")
    sheet = sheet.merge(pd.read_csv(arguments.data / "a100_40gb_train_memory_quality.csv"))
    names = np.random.default_rng(SEED).permutation(sorted(sheet.architecture.unique()))
    names = names[arguments.unseen : arguments.limit]
    traced = collect(names.tolist(), arguments.traces, arguments.processes)
    refused = traced[traced["refusal"].notna()] if "refusal" in traced else traced[:0]
    tasks = [
        (row.architecture, row.profile, tuple(arguments.batch_sizes))
        for row in traced.drop(refused.index).itertuples()
    ]
    with ProcessPoolExecutor(arguments.processes) as pool:
        rows = [row for part in pool.map(simulate, tasks, chunksize=4) for row in part]
        usable = pd.DataFrame(rows).merge(sheet[sheet["class"] == "usable"])
        if arguments.fit:
            fit_shares(usable, tasks, pool)
            return
    halves = {
        "architectures held out": in_first_half(usable.architecture),
        "families held out": in_first_half(usable.architecture.map(family_of)),
    }
    result: dict[str, object] = {
        "architectures": len(traced),
        "refused": refused.set_index("architecture").refusal.to_dict() if len(refused) else {},
        "rows_judged": len(usable),
        "trace_cpu_s_median_p95": traced.traced_s.quantile([0.5, 0.95]).round(2).tolist(),
        "replay_cpu_ms_median_p95": (usable.replayed_s * 1e3)
        .quantile([0.5, 0.95])
        .round(1)
        .tolist(),
    }
    for half_name, half in halves.items():
        result[half_name] = {column: errors(usable, column, half) for column in COLUMNS}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
