"""Compiled training steps of PyTorch's dashboard on an A100, next to ours
(docs/research/step_time.md).

The sheet has the ratio of the compiled to the eager step's time, and of their peaks of allocated
memory. No constant of compiled steps was fitted to it. Its PyTorch is of March 2023.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from research.held_out import percent_errors
from research.priors.steps import DASHBOARD_FILE
from trappm.learner.interface import Workload
from trappm.learner.physics.compiled_step import log_ratio
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Execution, Precision, StepSettings
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import TraceSettings

ROWS = ["precision", "figure"]


def log_ratios(row: Mapping[str, object]) -> dict[str, float]:
    """Return the logarithm of the compiled step's time relative to the eager step's, and 0.

    The answer about memory is that of the eager step.
    """
    architecture, batch_size = str(row["architecture"]), int(str(row["batch_size"]))
    workloads = []
    for execution in (Execution.EAGER, Execution.COMPILE):
        settings = StepSettings(precision=Precision(str(row["precision"])), execution=execution)
        # timm had no fused attention before May 2023.
        how = TraceSettings.of(settings)._replace(fused_attention=False)
        step = trace(architecture, int(str(row["input_size"])), how)
        workloads.append(Workload.of(step, settings, batch_size=batch_size, with_kernels=True))
    family = family_of(architecture)
    return {"time": log_ratio(*workloads, family), "memory": 0.0}


def main() -> None:
    """Print the ratio of each step, ours and real, and the errors; takes about five minutes."""
    sheet = pd.read_csv(DASHBOARD_FILE)
    real = pd.DataFrame(
        {
            "time": np.log(sheet.compiled_ms / sheet.eager_ms).fillna(-np.log(sheet.speedup)),
            "memory": -np.log(sheet.memory_ratio),
        }
    )
    rows = []
    for row, known in zip(sheet.to_dict("records"), real.to_dict("records"), strict=True):
        ours = log_ratios(row) if any(map(math.isfinite, known.values())) else {}
        for name in (name for name in ours if math.isfinite(known[name])):
            rows.append((row["architecture"], row["precision"], name, known[name], ours[name]))
            print(
                f"{rows[-1][0]:30} {rows[-1][1]:8} {name:6} real {math.exp(known[name]):.2f}"
                f" ours {math.exp(ours[name]):.2f}",
                flush=True,
            )
    table = pd.DataFrame(rows, columns=["architecture", *ROWS, "real", "ours"])
    table["log"] = table.ours - table.real
    table["error"] = percent_errors(table.real - table.ours)
    table["of_eager"] = percent_errors(table.real)
    of_kind = table.groupby(ROWS)
    print(
        pd.DataFrame(
            {
                "rows": of_kind.size(),
                "mean_%": of_kind.error.mean(),
                "median_%": of_kind.error.median(),
                "eager_answer_%": of_kind.of_eager.mean(),
                "bias_%": 100 * np.expm1(of_kind.log.median()),
                "log_90": of_kind.log.apply(lambda log: log.abs().quantile(0.9)),
            }
        )
        .round(2)
        .to_string()
    )
