"""How well simulated memory meets measured A100 memory, and what it costs to simulate.

    python benchmarks/memory_simulation.py ../shared/data [--every N]

Traces each architecture of the published sheet (see that folder's README), replays it at the
measured batch sizes, fits two coefficients, `c0 + c1 * reserved`, on half of the architectures, and
reports errors on the other half, usable rows with spikes included.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd

COLUMNS = ("live_mib", "reserved_mib", "reserved_with_workspace_mib")


def simulate(task: tuple[str, tuple[int, ...]]) -> list[dict[str, object]]:
    import torch

    from profiler.errors import TrappmError
    from profiler.memory_simulation import simulate_memory
    from profiler.step_recorder import trace_step
    from profiler.zoo import create_model, native_input_size

    torch.set_num_threads(1)
    architecture, batch_sizes = task
    started = time.process_time()
    try:
        size = native_input_size(architecture) or 224
        with torch.device("meta"):
            model = create_model(architecture, size)
        trace = trace_step(model, size)
    except TrappmError as error:
        return [{"architecture": architecture, "refusal": str(error)}]
    traced_s, started = time.process_time() - started, time.process_time()
    memory = {batch_size: simulate_memory(trace, batch_size) for batch_size in batch_sizes}
    replayed_s = (time.process_time() - started) / len(batch_sizes)
    return [
        {
            "architecture": architecture,
            "batch_size": batch_size,
            "traced_s": traced_s,
            "replayed_s": replayed_s,
            **{column: getattr(found, column) for column in COLUMNS},
        }
        for batch_size, found in memory.items()
    ]


def fit(simulated: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """c0 and c1 with the least absolute relative error, by iteratively reweighted least squares."""
    terms = np.stack([np.ones_like(simulated), simulated], axis=1)
    weights = 1 / measured
    for _ in range(50):
        scaled = terms * weights[:, None]
        found = np.linalg.lstsq(scaled, measured * weights, rcond=None)[0]
        gaps = np.abs(terms @ found - measured) / measured
        weights = 1 / measured / np.sqrt(np.maximum(gaps, 0.005))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take every N-th architecture")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    sheet = pd.read_csv(arguments.data / "a100_40gb_train_memory.csv")
    sheet = sheet.merge(pd.read_csv(arguments.data / "a100_40gb_train_memory_quality.csv"))
    names = sorted(sheet.architecture.unique())[:: arguments.every]
    batch_sizes = tuple(sorted(sheet.batch_size.unique().tolist()))
    with ProcessPoolExecutor(arguments.processes) as pool:
        rows = [
            row for found in pool.map(simulate, ((n, batch_sizes) for n in names)) for row in found
        ]
    table = pd.DataFrame(rows)
    refused = table[table["refusal"].notna()] if "refusal" in table else table[:0]
    traced = table.drop(refused.index)
    usable = traced.merge(sheet[sheet["class"] == "usable"])
    halves = np.random.default_rng(1337).permutation(usable.architecture.unique())
    held_out = usable.architecture.isin(halves[: len(halves) // 2])
    result: dict[str, object] = {
        "architectures": len(names),
        "refused": dict(zip(refused.architecture, refused.refusal, strict=True))
        if len(refused)
        else {},
        "rows_judged": int(held_out.sum()),
        "trace_cpu_s_median_p95": traced.traced_s.quantile([0.5, 0.95]).round(2).tolist(),
        "replay_ms_median_p95": (traced.replayed_s * 1e3).quantile([0.5, 0.95]).round(1).tolist(),
    }
    for column in COLUMNS:
        train, test = usable[~held_out], usable[held_out]
        c0, c1 = fit(train[column].to_numpy(), train.max_gpu_memory_mib.to_numpy())
        measured = test.max_gpu_memory_mib.to_numpy()
        error = np.abs(c0 + c1 * test[column].to_numpy() - measured) / measured * 100
        plain = error[test.spike.to_numpy() == 0]
        result[column] = {
            "c0_mib": round(float(c0), 1),
            "c1": round(float(c1), 4),
            "mape": round(float(error.mean()), 2),
            "median_ape": round(float(np.median(error)), 2),
            "mape_without_spikes": round(float(plain.mean()), 2),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
