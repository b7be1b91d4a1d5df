"""What a day with a GPU showed: measured steps beside what was simulated, without fitting anything.

    PYTHONPATH=. python research/gpu_day/gpu_check.py FOLDER [--json]

FOLDER has the sweeps that `trappm measure --sweep` wrote (*.jsonl, also compressed as
*.jsonl.xz, of one device; docs/gpu_day.md). Compared are

    memory       simulated live and reserved bytes, and what cuBLAS keeps, with the peaks of CUDA's
                 allocator; what a process takes beside it with what is assumed of that
    step time    the prior from the card's data sheet, and with the constants that the shipped
                 snapshot has of the RTX 3090; steps that wait for the host apart: where the GPU
                 was seen to be idle a fifth of the time, or else by the simulation
    repeats      what two sweeps measured of the same configurations, by the same parting

Profiles are made once and kept in TRAPPM_HOME.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from research.evaluation.labelled_workloads import prepare
from trappm.cluster.profiles import StepCache
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.kernel_terms import terms_of
from trappm.learner.physics.kernel_times import Lookup, times_of
from trappm.learner.physics.step_memory import amp_factor, step_memory
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.learner.workload import Workload
from trappm.prediction.snapshot_choice import SHIPPED
from trappm.profiler.devices.catalogue import CONTEXT_MIB, card_of
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Configuration, Measurement, Outcome, Phase, Provenance
from trappm.store import Home, Store

CONSTANTS_OF = "rtx3090"
AIMS = {"step_time_ms": 2.0, "memory_mib": 0.5, "power_w": 5.0}
"""Median difference of two measurements in %."""
SOURCES = ("sheet", CONSTANTS_OF)
BUSY = 0.8
"""NVML's utilization of a GPU that waits for nobody: below 1, as the power window has pauses."""


@dataclass(frozen=True)
class Row:
    """One configuration: what was measured, and what was simulated; sizes in MiB, times in ms."""

    configuration: Configuration
    measured_ms: float
    simulated_ms: dict[str, float]
    """By where the constants come from: `SOURCES`."""
    waits_for_host: bool
    allocated: tuple[float, float] | None
    """Simulated and measured, as the next."""
    reserved: tuple[float, float] | None
    beyond_mib: float | None
    """Of the process, beside what the allocator reserved."""


@dataclass(frozen=True)
class Off:
    """How far simulations are off."""

    count: int
    ratio: float
    """Simulated over measured, median."""
    median: float
    """Absolute error in %."""
    mape: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Off:
        simulated, measured = np.array(pairs).T
        error = 100 * np.abs(simulated / measured - 1)
        ratio = float(np.median(simulated / measured))
        return cls(len(pairs), ratio, float(np.median(error)), float(error.mean()))

    def __str__(self) -> str:
        return f"{self.count:5} {self.ratio:8.2f} {self.median:8.1f} {self.mape:8.1f}"


def read_sweeps(folder: Path) -> dict[str, list[Measurement]]:
    """All measurements of a folder by the name of their file.

    Raises:
        InputError: there are none, or a line is no measurement.
    """
    sweeps: dict[str, list[Measurement]] = {}
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.xz")]):
        name = path.name.removesuffix(".xz")
        if name in sweeps:
            raise InputError(f"{folder} has {name} twice, once compressed; remove one")
        opened = lzma.open if path.suffix == ".xz" else open
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    sweeps.setdefault(name, []).append(Measurement.from_dict(json.loads(line)))
                except (ValueError, KeyError, TypeError) as error:
                    raise InputError(f"line {number} of {path} is no measurement") from error
    if not sweeps:
        raise InputError(f"{folder} has no sweeps (*.jsonl, *.jsonl.xz); see docs/gpu_day.md")
    devices = {(m.device, m.environment.get("device_name")) for ms in sweeps.values() for m in ms}
    if len({device for device, _ in devices}) > 1:
        raise InputError(f"{folder} has sweeps of several devices: {sorted(map(str, devices))}")
    return sweeps


def latest(measurements: Sequence[Measurement]) -> dict[Configuration, Measurement]:
    """What was measured of each configuration last."""
    return {m.configuration: m for m in measurements if m.outcome is Outcome.OK}


def compare(measured: dict[Configuration, Measurement], processes: int) -> list[Row]:
    """Each measured configuration that can be simulated.

    Raises:
        InputError: no card of the catalogue, or nothing to compare.
    """
    home = Home.open()
    with Store.open(home.database_url) as store:
        prepared = prepare(
            [*measured.values()],
            "step_time_ms",
            store,
            StepCache(home.step_profiles),
            processes=processes,
            watch=lambda done, total, what: print(f"{done}/{total} {what}", file=sys.stderr),
        )
    samples = prepared.samples
    priors = {phase: _priors(prepared.card, phase) for phase in Phase}
    card = card_of(prepared.card)
    assert card is not None, "the priors would have refused it"
    rows = []
    for configuration, workload in zip(samples.configurations, samples.workloads, strict=True):
        by_source = priors[configuration.phase]
        workspace_mib = card.library_workspace_mib(configuration.phase)
        rows.append(_row(measured[configuration], workload, by_source, workspace_mib))
    return rows


def _priors(card: str, phase: Phase) -> dict[str, StepTimePrior]:
    sheet = StepTimePrior(spec_of(card))
    head = load_snapshot(SHIPPED).heads[CONSTANTS_OF][phase].heads.heads["step_time_ms"]
    return {"sheet": sheet, CONSTANTS_OF: sheet.started_from(head.prior)}


def _row(
    measurement: Measurement,
    workload: Workload,
    priors: dict[str, StepTimePrior],
    workspace_mib: float,
) -> Row:
    detail = measurement.memory_detail_mib
    memory = step_memory(workload)
    factor = amp_factor(workload, memory)
    live = factor * memory.live_mib + workspace_mib
    reserved = live + factor * (memory.fragments_mib + memory.scratch_mib)
    seen, taken = detail.get("peak_allocated"), detail.get("peak_reserved")
    whole = measurement.memory_mib
    sheet = priors["sheet"]
    utilization = measurement.environment.get("gpu_utilization")
    times = times_of(terms_of([workload], sheet.spec), Lookup(sheet.constants), sheet.spec)
    waits = bool(times.host[0] > times.device[0])
    assert measurement.step_time_ms is not None
    return Row(
        configuration=measurement.configuration,
        measured_ms=measurement.step_time_ms,
        simulated_ms={
            source: float(np.exp(prior.log_values([workload])[0]))
            for source, prior in priors.items()
        },
        waits_for_host=waits if utilization is None else utilization < BUSY,
        allocated=None if seen is None else (live, seen),
        reserved=None if taken is None else (reserved, taken),
        beyond_mib=None if whole is None or taken is None else whole - taken,
    )


def repeats(
    sweeps: dict[str, list[Measurement]], among: Container[Configuration]
) -> dict[str, dict[str, float]]:
    """By metric: how far what two files have of one of these configurations differs, in %."""
    by_configuration: dict[Configuration, list[Measurement]] = defaultdict(list)
    for measurements in sweeps.values():
        for configuration, measurement in latest(measurements).items():
            if configuration in among:
                by_configuration[configuration].append(measurement)
    differing: dict[str, dict[str, float]] = {}
    for metric, aim in AIMS.items():
        differences = []
        for several in by_configuration.values():
            values = [getattr(m, metric) for m in several[-2:]]
            if len(values) == 2 and None not in values:
                differences.append(100 * abs(values[0] - values[1]) / (sum(values) / 2))
        if differences:
            differing[metric] = {
                "count": len(differences),
                "median": float(np.median(differences)),
                "p90": float(np.quantile(differences, 0.9)),
                "aim": aim,
            }
    return differing


GROUPS: dict[str, Callable[[Row], str]] = {
    "phase": lambda row: str(row.configuration.phase),
    "precision": lambda row: str(row.configuration.precision),
    "family": lambda row: family_of(row.configuration.architecture),
}


def by_group(
    rows: Sequence[Row], pair: Callable[[Row], tuple[float, float] | None]
) -> dict[str, Off]:
    """How far simulations are off, of all rows and by each of `GROUPS`."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        values = pair(row)
        if values is not None:
            errors.setdefault("all", []).append(values)
            for group, name_of in GROUPS.items():
                errors.setdefault(f"{group} {name_of(row)}", []).append(values)
    order = sorted(errors, key=lambda name: (name != "all", name))
    return {name: Off.of(errors[name]) for name in order}


def summarize(sweeps: dict[str, list[Measurement]], rows: Sequence[Row]) -> dict[str, object]:
    """All of the answer, as plain values but for `Off`."""
    everything = [m for measurements in sweeps.values() for m in measurements]
    beyond = [
        row.beyond_mib - CONTEXT_MIB[row.configuration.phase]
        for row in rows
        if row.beyond_mib is not None
    ]
    times: dict[str, dict[str, Off]] = {}
    repeated: dict[str, dict[str, dict[str, float]]] = {}
    for waits, which in ((False, "busy device"), (True, "waiting for the host")):
        some = [row for row in rows if row.waits_for_host is waits]
        repeated[which] = repeats(sweeps, {row.configuration for row in some})
        for source in SOURCES:
            times[f"{which}, constants: {source}"] = by_group(
                some, lambda row, source=source: (row.simulated_ms[source], row.measured_ms)
            )
    return {
        "device": everything[0].device,
        "device_name": everything[0].environment.get("device_name"),
        "measured": all(m.provenance is Provenance.MEASURED for m in everything),
        "outcomes": dict(Counter(str(m.outcome) for m in everything)),
        "compared": len(rows),
        "repeats": repeated,
        "beyond_mib": None
        if not beyond
        else dict(zip(("p10", "median", "p90"),
                      np.quantile(beyond, [0.1, 0.5, 0.9]).tolist(), strict=True)),
        "allocated": by_group(rows, lambda row: row.allocated),
        "reserved": by_group(rows, lambda row: row.reserved),
        "step_time": {name: offs for name, offs in times.items() if offs},
    }  # fmt: skip


def as_text(summary: dict) -> str:
    """The answer in 80 columns: first in short, then by group."""
    outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items())
    lines = [f"{summary['device_name']} ({summary['device']}), {summary['compared']} compared"]
    lines += [f"attempts: {outcomes}"]
    if not summary["measured"]:
        lines += ["NOT MEASURED: these answers were simulated or replayed; no truth in them."]
    lines += [
        f"memory, {name:10} simulated over measured {off.ratio:.3f}, error {off.median:.1f} %"
        for name in ("allocated", "reserved")
        if (off := summary[name].get("all"))
    ]
    if beyond := summary["beyond_mib"]:
        lines.append(
            f"memory beyond it   {beyond['median']:+.0f} MiB more than assumed (median; "
            f"{beyond['p10']:+.0f} to {beyond['p90']:+.0f})"
        )
    for name, offs in summary["step_time"].items():
        off = offs["all"]
        lines.append(f"step time, {name}:")
        lines.append(f"    simulated over measured {off.ratio:.2f}, median error {off.median:.0f} %"
                     f" ({off.count} steps)")  # fmt: skip
    for which, by_metric in summary["repeats"].items():
        lines += [f"repeats, {which}:"] if by_metric else []
        for metric, repeat in by_metric.items():
            verdict = "within" if repeat["median"] < repeat["aim"] else "MISSES"
            lines.append(
                f"    {metric:12} {repeat['median']:5.2f} % (median of {repeat['count']}; "
                f"90 %: {repeat['p90']:.2f}), {verdict} the aim of {repeat['aim']:g} %"
            )
    tables = [("memory, " + name, summary[name]) for name in ("allocated", "reserved")]
    for name, offs in [*tables, *((f"step time, {n}", o) for n, o in summary["step_time"].items())]:
        lines += ["", f"{name}", f"{'':28}{'count':>5} {'ratio':>8} {'median %':>8} {'MAPE %':>8}"]
        lines += [f"{group:28}{off}" for group, off in offs.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    parser.add_argument("--processes", type=int, default=1, help="that trace models at once")
    options = parser.parse_args()
    try:
        sweeps = read_sweeps(options.folder)
        measured = latest([m for measurements in sweeps.values() for m in measurements])
        summary = summarize(sweeps, compare(measured, options.processes))
    except TrappmError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    print(json.dumps(summary, default=asdict, indent=1) if options.json else as_text(summary))


if __name__ == "__main__":
    main()
