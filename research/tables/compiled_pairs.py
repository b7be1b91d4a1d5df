"""Ratios of compiled to eager steps on a CPU, from pairs measured here
(docs/research/compiled_steps.md).

The sheet has the pairs of one campaign, on two threads in fp32. Each architecture is held out.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from research.data import ROOT
from trappm.learner.physics.compiled_step import times_of_pairs
from trappm.learner.snapshots.compiled_ratios import Pairs, by_kernels, by_median, held_out_errors
from trappm.learner.workload import Workload
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Graph, Phase
from trappm.profiler.static_profile import step_profile
from trappm.profiler.tracing.tracer import StepOptions

FILE = ROOT / "research/data/compiled_pairs_cpu_2t.csv"


def pairs_of(sheet: pd.DataFrame, phase: Phase) -> Pairs:
    """Return the pairs of a phase."""
    rows = sheet[sheet.phase == phase]
    steps: dict[bool, list[Workload]] = {False: [], True: []}
    for row in rows.itertuples():
        for is_compiled, workloads in steps.items():
            options = StepOptions(is_compiled=is_compiled)
            step = step_profile(row.architecture, row.input_size, options)
            graph = Graph.empty(row.batch_size)
            workloads.append(Workload(graph=graph, phase=phase, step=step, kernels=step.kernels))
    return Pairs(
        measured=np.log(rows.compiled_ms / rows.eager_ms).to_numpy(),
        families=rows.architecture.map(family_of).to_numpy(dtype=np.str_),
        groups=rows.architecture.to_numpy(dtype=np.str_),
        times=times_of_pairs(steps[False], steps[True]),
    )


def main() -> None:
    """Print errors of the ratio by phase and method."""
    sheet = pd.read_csv(FILE)
    table = []
    for phase in Phase:
        pairs = pairs_of(sheet, phase)
        errors = {
            "eager answer": pairs.measured,
            "median": held_out_errors(pairs, by_median),
            "fused kernels": held_out_errors(pairs, by_kernels),
        }
        for name, logs in errors.items():
            off = 100 * np.abs(np.expm1(-logs))
            rms = np.sqrt((logs**2).mean())
            table.append((phase.value, name, len(logs), off.mean(), np.median(off), rms))
    columns = ["phase", "method", "pairs", "mean_%", "median_%", "rms_log"]
    print(pd.DataFrame(table, columns=columns).round(3).to_string(index=False))
