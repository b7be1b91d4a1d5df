"""Importer of GPUMemNet's sheet: training memory of timm models on an A100 40 GB.

The column `faketensor_mib` is PyTorch's sum of parameters and activations in fp32 without the CUDA
context. It is a lower bound of any training run, so a run that logged less failed in its first
step; so did runs that logged identical memory, at most the context above the floor. Such a run
counts as out of memory if its lower bound exceeds the capacity, or if a smaller batch ran out of
memory; otherwise the reason of the failure is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from research.importers.sheets import (
    SECOND,
    UNTOLD,
    Cells,
    known_input_size,
    number_in,
    published,
    read_rows,
    reject,
    text_in,
    whole_in,
)
from trappm.profiler.records import Configuration, Outcome, Protocol
from trappm.store.files import ParsedRow

DEVICE = "a100-40gb"
CAPACITY_MIB = 40_536.0
"""Capacity of an A100 of 40 GB by its driver: PyTorch's errors report 39.59 GiB."""
AT_CAPACITY_MIB = 38_000.0
"""Most runs that logged at least this much failed at the limit (README of the data)."""
SAME = 0.02
"""Relative difference of runs that ended at the same point (docs/research/design_notes.md)."""
CONTEXT_MIB, PER_TENSOR_MIB, SPIKE = 1_750.0, 1.23, 1.6
"""Typical memory over the floor (1.23 is the sheet's median, docs/research/design_notes.md). Memory
above 1.6 times the typical value is a spike from cuDNN workspaces (README of the data)."""
LOGGED = ("max_gpu_memory_mib", "faketensor_mib")
PROTOCOL = Protocol(name="gpumemnet", warmup_steps=0, min_steps=1, max_steps=1)
ENVIRONMENT = {
    "device": DEVICE,
    "device_name": "NVIDIA A100 40GB",
    "device_memory_mib": CAPACITY_MIB,
    "source": "GPUMemNet, FakeTensor experiment",
    "untold": {"torch": UNTOLD, "protocol": UNTOLD},
}


@dataclass(frozen=True, kw_only=True, order=True)
class _Run:
    """A row of the sheet."""

    architecture: str
    batch_size: int
    memory_mib: float
    floor_mib: float

    @property
    def has_died(self) -> bool:
        return self.memory_mib < self.floor_mib

    @property
    def at_capacity(self) -> bool:
        return self.memory_mib >= AT_CAPACITY_MIB

    @property
    def is_usable(self) -> bool:
        return not self.has_died and not self.at_capacity


def _run(cells: Cells) -> _Run:
    memory_mib, floor_mib = (number_in(cells, name) for name in LOGGED)
    return _Run(
        architecture=text_in(cells, "architecture"),
        batch_size=whole_in(cells, "batch_size"),
        memory_mib=memory_mib,
        floor_mib=floor_mib,
    )


def parse_rows(path: Path) -> list[ParsedRow]:
    """Return each row of the sheet.

    Args:
        path: A CSV file with the columns architecture, batch_size, max_gpu_memory_mib and
            faketensor_mib.

    Raises:
        InputError: The file or a row of it cannot be read.
    """
    rows = sorted(read_rows(path, {"architecture", "batch_size", *LOGGED}, _run))
    result = []
    for architecture, group in groupby(rows, key=lambda run: run.architecture):
        runs: dict[int, _Run] = {}
        for run in group:
            known = runs.get(run.batch_size)
            if known is not None:
                result.append(SECOND)
            if known is None or (run.is_usable and not known.is_usable):
                runs[run.batch_size] = run
        input_size = known_input_size(architecture)
        if input_size is None:
            unknown = reject("timm does not know the architecture or its input size")
            result += [unknown] * len(runs)
            continue
        result += _parse_runs(input_size, [*runs.values()])
    return result


def _parse_runs(input_size: int, runs: list[_Run]) -> Iterator[ParsedRow]:
    """Yield the rows of the runs of one architecture, by rising batch size."""
    ends = [run.memory_mib for run in runs if run.has_died and not run.at_capacity]
    least_overhead_mib = 0.0
    out_of_memory = False
    for run in runs:
        died = run.has_died or (
            run.memory_mib < run.floor_mib + CONTEXT_MIB
            and any(abs(run.memory_mib / end - 1) <= SAME for end in ends)
        )
        usual_mib = CONTEXT_MIB + PER_TENSOR_MIB * run.floor_mib
        needs_mib = run.floor_mib + least_overhead_mib
        outcome, reason = Outcome.OK, "a run like others"
        detail_mib = {"logged": run.memory_mib, "floor": run.floor_mib}
        if run.at_capacity:
            outcome, reason = Outcome.OOM, "ended at the card's capacity"
        elif died and (out_of_memory or needs_mib >= CAPACITY_MIB):
            outcome, reason = Outcome.OOM, "died early, needs more than the card"
        elif died:
            outcome, reason = Outcome.ERROR, "died early, for no known reason"
        else:
            least_overhead_mib = max(least_overhead_mib, run.memory_mib - run.floor_mib)
            if run.memory_mib > SPIKE * usual_mib:
                reason = f"a spike: over {SPIKE} times the usual memory"
        if outcome is Outcome.OOM:
            out_of_memory = True
            detail_mib["capacity"] = CAPACITY_MIB
        configuration = Configuration(
            architecture=run.architecture, batch_size=run.batch_size, input_size=input_size
        )
        yield ParsedRow(
            reason=reason,
            measurement=published(
                configuration,
                PROTOCOL,
                ENVIRONMENT,
                outcome=outcome,
                row=f"{run.memory_mib} {run.floor_mib}",
                memory_mib=run.memory_mib if outcome is Outcome.OK else None,
                memory_detail_mib=detail_mib,
                message=None if reason == "a run like others" else reason,
            ),
        )
