"""Measured steps of a GPU day next to simulated ones, without fitting anything
(docs/research/h100_day.md).

The folder has the sweeps that `trappm measure --sweep` wrote (*.jsonl, also compressed as
*.jsonl.xz, of one device; docs/gpu_day.md). Compared are

    memory       simulated live and reserved bytes, and cuBLAS's workspace, with the peaks of CUDA's
                 allocator; the memory of a process outside the allocator with the assumed one
    step time    the prior from the card's data sheet, and with the constants that the shipped
                 snapshot has of the RTX 3090; steps that wait for the host apart: where the GPU
                 was idle a fifth of the time, or else by the simulation
    repeats      what two sweeps measured of the same configurations, divided in the same way
    labels       seconds of the largest sweep's attempts by part, and its labels per hour if other
                 rules had ended its measurements (research/tables/label_rate.py)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from research.evaluation.workbench import Processes, Workbench
from research.snapshot.shipped_sheets import OUR_OWN, our_attempts
from research.tables.label_rate import BUSY_SHARE, parts, rates
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.kernel_terms import terms_of
from trappm.learner.physics.kernel_times import Lookup, times_of
from trappm.learner.physics.step_memory import amp_factor, step_memory
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.learner.workload import Workload
from trappm.prediction.snapshot_choice import SHIPPED
from trappm.profiler.devices.catalogue import CONTEXT_MIB, card_of
from trappm.profiler.errors import InputError
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Configuration, Measurement, Outcome, Phase, Provenance

CONSTANTS_OF = "rtx3090"
SOURCES = ("sheet", CONSTANTS_OF)
AIMS = {"step_time_ms": 2.0, "memory_mib": 0.5, "power_w": 5.0}
"""Largest acceptable median difference of two measurements in percent."""
BUSY, WAITING = "busy device", "waiting for the host"
MEMORY = ("allocated", "reserved")


def read_sweeps(folder: Path) -> dict[str, list[Measurement]]:
    """Return all measurements of a folder by the name of their file.

    Raises:
        InputError: The folder is empty, has several devices, or a line is not a measurement.
    """
    sweeps: dict[str, list[Measurement]] = {}
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.xz")]):
        name = path.name.removesuffix(".xz")
        if name in sweeps:
            raise InputError(f"{folder} has {name} compressed and uncompressed; remove one")
        sweeps[name] = our_attempts(path.resolve())
    if not any(sweeps.values()):
        raise InputError(f"{folder} has no sweeps (*.jsonl, *.jsonl.xz); see docs/gpu_day.md")
    devices = {str(m.device) for ms in sweeps.values() for m in ms}
    if len(devices) > 1:
        raise InputError(f"{folder} has sweeps of several devices: {', '.join(sorted(devices))}")
    return sweeps


def latest(measurements: Sequence[Measurement]) -> dict[Configuration, Measurement]:
    """Return the last successful measurement of each configuration."""
    return {m.configuration: m for m in measurements if m.outcome is Outcome.OK}


def compare(measured: Mapping[Configuration, Measurement], processes: int) -> pd.DataFrame:
    """Return a row per configuration that can be simulated; sizes in MiB, times in ms.

    Raises:
        InputError: The card is not in the catalogue, or there is nothing to compare.
    """
    bench = Workbench(metric="step_time_ms", processes=processes)
    prepared = bench.prepared([*measured.values()])
    card, spec = card_of(prepared.card), spec_of(prepared.card)
    assert card is not None, "spec_of would have refused it"
    heads = load_snapshot(SHIPPED).heads[CONSTANTS_OF]
    sheet, rows = StepTimePrior(spec), []
    for configuration, workload in zip(
        prepared.samples.configurations, prepared.samples.workloads, strict=True
    ):
        known = heads[configuration.phase].heads.heads["step_time_ms"].prior
        priors = {"sheet": sheet, CONSTANTS_OF: sheet.started_from(known)}
        measurement = measured[configuration]
        rows.append(
            {
                "configuration": configuration,
                "phase": f"phase {configuration.phase}",
                "precision": f"precision {configuration.precision}",
                "family": f"family {family_of(configuration.architecture)}",
                "measured_ms": measurement.step_time_ms,
                **{
                    source: float(np.exp(prior.log_values([workload])[0]))
                    for source, prior in priors.items()
                },
                "waits": _waits(measurement, workload, sheet),
                **_memory(measurement, workload, card.library_workspace_mib(configuration.phase)),
            }
        )
    return pd.DataFrame(rows)


def _waits(measurement: Measurement, workload: Workload, sheet: StepTimePrior) -> str:
    utilization = measurement.environment.get("gpu_utilization")
    times = times_of(terms_of([workload], sheet.spec), Lookup(sheet.constants), sheet.spec)
    waits = times.host[0] > times.device[0] if utilization is None else utilization < BUSY_SHARE
    return WAITING if waits else BUSY


def _memory(
    measurement: Measurement, workload: Workload, workspace_mib: float
) -> dict[str, float | None]:
    detail, whole = measurement.memory_detail_mib, measurement.memory_mib
    memory = step_memory(workload)
    factor = amp_factor(workload, memory)
    live = factor * memory.live_mib + workspace_mib
    reserved = detail.get("peak_reserved")
    return {
        "simulated_allocated": live,
        "allocated": detail.get("peak_allocated"),
        "simulated_reserved": live + factor * (memory.fragments_mib + memory.scratch_mib),
        "reserved": reserved,
        "outside": None if whole is None or reserved is None else whole - reserved,
    }


def repeats(sweeps: Mapping[str, Sequence[Measurement]], rows: pd.DataFrame) -> pd.DataFrame:
    """Return the differences of the last two files by configuration, in percent."""
    known = [latest(measurements) for measurements in sweeps.values()]
    table = {}
    for (which, metric), aim in {(w, m): AIMS[m] for w in (BUSY, WAITING) for m in AIMS}.items():
        among = rows.configuration[rows.waits == which]
        pairs = [[getattr(of[c], metric) for of in known if c in of][-2:] for c in among]
        values = np.array([p for p in pairs if len(p) == 2 and None not in p], dtype=np.float64)
        if len(values):
            apart = 100 * np.abs(values[:, 0] - values[:, 1]) / values.mean(axis=1)
            table[f"{metric}, {which}"] = {
                "count": len(apart),
                "median": np.median(apart),
                "p90": np.quantile(apart, 0.9),
                "aim": aim,
                "verdict": "within" if np.median(apart) < aim else "misses",
            }
    return pd.DataFrame(table).T


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the errors of simulations by quantity, for all rows, families and settings."""
    quantities = {f"memory, {name}": (rows, f"simulated_{name}", name) for name in MEMORY}
    for which in (BUSY, WAITING):
        some = rows[rows.waits == which]
        for source in SOURCES:
            name = f"step time, {which}, constants: {source}"
            quantities[name] = (some, source, "measured_ms")
    tables = {}
    for name, (some, simulated, measured) in quantities.items():
        ratio = (some[simulated] / some[measured].astype(float)).dropna()
        error = 100 * (ratio - 1).abs()
        for key in (pd.Series("all", some.index), some.family, some.phase, some.precision):
            for group, own in ratio.groupby(key.loc[ratio.index]):
                tables[name, group] = {
                    "count": len(own),
                    "ratio": own.median(),
                    "median": error[own.index].median(),
                    "mape": error[own.index].mean(),
                }
    return pd.DataFrame(tables).T


def main(
    folder: Annotated[Path, typer.Argument(help="Folder with the sweeps.")] = OUR_OWN
    / "h100/sweeps",
    as_json: Annotated[bool, typer.Option("--json", help="Print all values as JSON.")] = False,
    processes: Processes = 1,
) -> None:
    """Compare the sweeps of a folder with simulations."""
    sweeps = read_sweeps(folder)
    everything = [m for measurements in sweeps.values() for m in measurements]
    rows = compare(latest(everything), processes)
    assumed = {f"phase {phase}": CONTEXT_MIB[phase] for phase in Phase}
    outside = (rows.outside.astype(float) - rows.phase.map(assumed)).dropna()
    about = {
        "device": everything[0].device,
        "device_name": everything[0].environment.get("device_name"),
        "measured": all(m.provenance is Provenance.MEASURED for m in everything),
        "outcomes": dict(Counter(str(m.outcome) for m in everything)),
        "compared": len(rows),
        "mib_beyond_assumed_context": outside.quantile([0.1, 0.5, 0.9]).round(1).tolist(),
    }
    repeated, table = repeats(sweeps, rows), errors(rows)
    largest = max(sweeps, key=lambda name: len(sweeps[name]))
    seconds, per_hour = parts(sweeps[largest]), rates(sweeps[largest])
    if as_json:
        tables = {name: own.droplevel(0).to_dict("index") for name, own in table.groupby(level=0)}
        document = {
            **about,
            "repeats": repeated.to_dict("index"),
            "errors": tables,
            "label_seconds": seconds.to_dict(),
            "label_rates": per_hour.to_dict("index"),
        }
        print(json.dumps(document, indent=1))
        return
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    if not about["measured"]:
        print("NOT MEASURED: these values were simulated or replayed.")
    print(f"\ndifferences of two sweeps in %\n{repeated.to_string(float_format='{:.2f}'.format)}")
    print(f"\nsimulated / measured, errors in %\n{table.round(2).to_string()}")
    if not per_hour.empty:
        print(f"\nseconds of an attempt of {largest}\n{seconds.round(2).to_string()}")
        print(f"\nlabels per hour, and % by which medians move\n{per_hour.round(2).to_string()}")
