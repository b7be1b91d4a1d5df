"""Training of the shipped snapshot on published and own labels.

The snapshot gives predictions without a campaign: memory of training on an A100 (GPUMemNet),
training steps on an RTX 3090 and inference steps on an RTX 3090 and 4090 (timm's own results), both
in fp32 on a V100 (pycls, pytorch-gpu-benchmark, with NeuSight's kernels), our own labels of an H100
and of CPU cores of two hosts. Heads are judged on held-out architectures, then trained on all
labels. Missing traces are stored in TRAPPM_HOME. Equal labels and seeds give equal heads.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from research.data import data_folder
from research.evaluation.benchmark import Samples, Score, score
from research.evaluation.label_files import read_usable
from research.evaluation.workbench import (
    CORES,
    Processes,
    Workbench,
    key_of,
    samples_of,
    show_progress,
    traced_steps,
    workload_of,
)
from research.held_out import held_out
from research.importers.neusight import SOURCE as NEUSIGHT
from research.priors.joint_fit import (
    LEARNED_FROM,
    Evidence,
    HostedWorkload,
    SharedPrior,
    known_distribution,
)
from research.priors.kernel_sources import SAILOR, SAILOR_CARDS, SAILOR_FILE, megatron_products
from research.snapshot.shipped_sheets import (
    KERNELS_FILE,
    SEED,
    SHEETS,
    LabelSheet,
    neusight_kernels,
)
from trappm.learner.heads.physics_heads import (
    OTHER_CARDS,
    Head,
    Heads,
    Ours,
    known_of_others,
    starting_prior,
)
from trappm.learner.interface import TrainedHeads, TrainingLabel
from trappm.learner.paper.presets import LAPTOP
from trappm.learner.physics.memory import MemoryPrior
from trappm.learner.physics.power import LEARNED_FROM as POWER_LEARNED_FROM
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time import StepTimePrior
from trappm.learner.snapshots.manifest import MANIFEST
from trappm.learner.snapshots.snapshot import SnapshotInfo, load_snapshot, save_snapshot
from trappm.prediction.selection import SHIPPED
from trappm.profiler.devices.catalogue import card_name, read_name, spec_of
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.records import (
    METRICS,
    Graph,
    Measurement,
    Outcome,
    Phase,
    StepSettings,
    is_cpu_device,
)
from trappm.store import Home

SPLIT = (
    "a fifth of the architectures held out, names of the same layers together, seed 1337; then "
    "trained on all labels. Step times of V100 and H100 start from other cards' steps, of the "
    "held-out architectures too; intervals of CPU step times are widened for other hosts"
)


@dataclass(frozen=True, eq=False)
class PreparedSheet:
    """Labels of one sheet with all that its head learns from."""

    sheet: LabelSheet
    prior: Prior
    samples: Samples
    bench: Workbench
    measurements: Sequence[Measurement]
    """All labels of the sheet, or those that were drawn."""
    files: Mapping[str, str]
    """File of each label by its attempt key."""
    kernels: Mapping[str, Evidence]
    """Single kernels by file."""

    def judged(self, seed: int = SEED) -> tuple[Head[Prior], np.ndarray[Any, np.dtype[np.int64]]]:
        """Return the head trained without a fifth of the architectures, and the held-out rows."""
        test = held_out(self.samples.groups, seed)
        head = _fit(self.sheet, self.prior, self.samples, np.flatnonzero(~test))
        return head, np.flatnonzero(test)


@dataclass(frozen=True, eq=False)
class Trained:
    """Trained head of one sheet."""

    sheet: LabelSheet
    head: Head[Prior]
    errors: Mapping[Phase, Score]
    """Errors on held-out architectures by phase."""
    measurements: Sequence[Measurement]
    """Labels that the head was trained on."""
    files: Mapping[str, str]
    """File of each label by its attempt key."""
    kernels: Mapping[str, Evidence]
    """Single kernels in the training data by file."""


def prepare(
    sheet: LabelSheet, data: Path, processes: int, most: int | None = None
) -> PreparedSheet:
    """Read and trace the labels of one sheet.

    Args:
        sheet: The sheet.
        data: Folder of published sheets.
        processes: Number of processes that trace.
        most: Number of labels, of whole architectures (default: all).

    Raises:
        InputError: The file is missing or cannot be read.
    """
    by_file = sheet.labels(data)
    measurements = _some([label for labels in by_file.values() for label in labels], most)
    files = {m.attempt_key: file for file, ms in by_file.items() for m in ms}
    usable = read_usable(data / sheet.usable) if sheet.usable else None
    kernels = _kernels(sheet, data)
    bench = Workbench(metric=sheet.metric, processes=processes, usable=usable)
    if sheet.metric == "memory_mib" or is_cpu_device(sheet.device):
        samples = bench.prepared(measurements).samples
    else:
        samples = _select_timed(measurements, bench.home.traces, processes)
    prior = _prior(sheet, kernels)
    return PreparedSheet(sheet, prior, samples, bench, measurements, files, kernels)


def _some(measurements: list[Measurement], most: int | None) -> list[Measurement]:
    """Return labels of whole architectures; a larger number includes those of a smaller one."""
    if most is None:
        return measurements
    by_name: dict[str, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        by_name[measurement.configuration.architecture].append(measurement)
    chosen: list[Measurement] = []
    for name in sorted(by_name, key=lambda name: zlib.crc32(name.encode())):
        if len(chosen) + len(by_name[name]) > most:
            break
        chosen += by_name[name]
    return chosen


def train(sheet: LabelSheet, data: Path, processes: int) -> Trained:
    """Evaluate and train the head of one sheet in the folder `data`; raises as `prepare`."""
    part = prepare(sheet, data, processes)
    samples, what = part.samples, f"{sheet.metric} of {sheet.device}"
    show_progress(0, 2, f"judging {what}")
    judged, test = part.judged()
    phases = np.array([workload.phase for workload in samples.workloads])
    errors = {
        phase: score(samples, rows, judged.predict(samples.at(rows)))
        for phase in sheet.phases
        for rows in [test[phases[test] == phase]]
    }
    accuracy = {phase.value: of_phase["accuracy"] for phase, of_phase in errors.items()}
    show_progress(1, 2, f"training {what}: held-out errors {accuracy}")
    head = _fit(sheet, part.prior, samples, np.arange(len(samples)))
    return Trained(sheet, head, errors, part.measurements, part.files, part.kernels)


def _kernels(sheet: LabelSheet, data: Path) -> dict[str, Evidence]:
    """Return single kernels of a sheet's card by file: NeuSight's, and Megatron's products."""
    if sheet.kernels is None:
        return {}
    by_file = {KERNELS_FILE: neusight_kernels(data / KERNELS_FILE, sheet.kernels)}
    for card in SAILOR_CARDS:
        if read_name(card).model == read_name(sheet.kernels).model:
            by_file[SAILOR_FILE] = megatron_products(data, card)
    return by_file


def _prior(sheet: LabelSheet, kernels: Mapping[str, Evidence]) -> Prior:
    """Return the prior of a sheet's device without its labels."""
    spec = spec_of(sheet.device)
    if sheet.metric == "memory_mib" and not sheet.measured:
        return MemoryPrior()  # its constants start from this sheet with other software
    prior = starting_prior(sheet.metric, spec, kernels=True)
    if isinstance(prior, StepTimePrior) and (kernels or sheet.measured):
        return SharedPrior.like_others(spec, known_distribution(), tuple(kernels.values()))
    return prior


def source_of(measurement: Measurement) -> str:
    """Return the publisher; for our own labels, with the name of their device."""
    own = f"trappm, {measurement.environment.get('device_name')}"
    return str(measurement.environment.get("source", own))


def publish(trained: Sequence[Trained], registry: Path, kept: Path | None = None) -> SnapshotInfo:
    """Publish all heads as one snapshot, with the constants of other cards.

    Args:
        trained: Heads of all sheets, or of some.
        registry: Folder of snapshots.
        kept: Snapshot that has the heads of the others; None without others.
    """
    others, others_sources = known_of_others()
    others_sources += [
        {"metric": "power_w", "for": OTHER_CARDS, "file": file, "source": source,
         "licence": licence, "labels": count}
        for file, source, licence, count in POWER_LEARNED_FROM
    ]  # fmt: skip
    heads: dict[str, dict[Phase, TrainedHeads]] = {}
    errors: dict[str, Any] = {}
    sources: list[Mapping[str, Any]] = []
    if kept is not None:
        heads, errors, sources = kept_parts(kept, [part.sheet for part in trained])
    for part in trained:
        sheet = part.sheet
        for phase in sheet.phases:
            of_device = heads.setdefault(sheet.device, {})
            of_device[phase] = _beside(of_device.get(phase), _trained_heads(part, phase))
            of_phase = errors.setdefault(sheet.device, {}).setdefault(phase.value, {})
            of_phase[sheet.metric] = {
                **(part.errors[phase]["accuracy"] or {}),
                "by_family": {
                    family: {"count": of_family["count"], "mape": of_family["mape"]}
                    for family, of_family in part.errors[phase]["by_family"].items()
                    if of_family is not None
                },
                "reliability": part.errors[phase].get("reliability"),
            }
    labels = [
        _label(measurement, sheet)
        for sheet in SHEETS
        for of_file in sheet.labels(data_folder()).values()
        for measurement in of_file
        if _is_label(measurement, sheet)
    ]
    return save_snapshot(
        registry,
        others=others,
        heads=heads,
        source_device=SHEETS[0].device,
        preset=LAPTOP,
        labels=labels,
        fields={
            "campaign": None,
            "errors": errors,
            "split": SPLIT,
            "cards": _cards(),
            "label_counts": dict(Counter(label.provenance for label in labels)),
            "sources": [
                *sources,
                *(source for part in trained for source in _sources(part)),
                *others_sources,
            ],
        },
    )


def kept_parts(
    folder: Path, replaced: Sequence[LabelSheet]
) -> tuple[dict[str, dict[Phase, TrainedHeads]], dict[str, Any], list[Mapping[str, Any]]]:
    """Return heads, errors and sources of a snapshot without those of some sheets.

    Raises:
        TrappmError: Heads of a sheet are one set with those of another sheet, which is kept.
    """
    snapshot, manifest = load_snapshot(folder), json.loads((folder / MANIFEST).read_bytes())
    gone = {(sheet.device, phase.value) for sheet in replaced for phase in sheet.phases}
    shared = [s for s in SHEETS if s not in replaced and gone & {(s.device, p) for p in s.phases}]
    if shared:
        raise TrappmError(f"train {shared[0].files[0]} as well; it shares a set of heads")
    heads: dict[str, dict[Phase, TrainedHeads]] = {}
    errors: dict[str, Any] = {}
    for device, phases in manifest["heads"].items():
        for phase in phases:
            if (device, phase) not in gone:
                of_device = heads.setdefault(device, {})
                of_device[Phase(phase)] = snapshot.heads[device][Phase(phase)]
                errors.setdefault(device, {})[phase] = manifest["errors"][device][phase]
    devices = {sheet.device for sheet in replaced}
    sources = [
        row
        for row in manifest["sources"]
        if row.get("for") != OTHER_CARDS
        and (row["device"], row.get("phase")) not in gone
        and ("phase" in row or row["device"] not in devices)
    ]
    return heads, errors, sources


def _trained_heads(part: Trained, phase: Phase) -> TrainedHeads:
    of_phase = [m for m in part.measurements if m.configuration.phase is phase]
    settings = Counter(
        StepSettings(c.precision, c.memory_format, c.optimizer)
        for c in (m.configuration for m in of_phase)
    )
    count = sum(_is_label(m, part.sheet) for m in of_phase)
    return TrainedHeads(
        Heads({part.sheet.metric: part.head}, count),
        tuple(setting for setting, _ in settings.most_common()),
    )


def _beside(known: TrainedHeads | None, other: TrainedHeads) -> TrainedHeads:
    """Return heads of different metrics of a device and phase as one set.

    Raises:
        TrappmError: Their labels are of different settings, which a snapshot cannot distinguish.
    """
    if known is None:
        return other
    if set(known.settings) != set(other.settings):
        raise TrappmError(f"labels of {known.settings} and of {other.settings} in one set of heads")
    first, second = known.heads, other.heads
    assert isinstance(first, Heads) and isinstance(second, Heads)  # noqa: PT018  (made here)
    return TrainedHeads(
        Heads({**first.heads, **second.heads}, first.label_count + second.label_count),
        known.settings,
    )


def _sources(part: Trained) -> Iterator[dict[str, Any]]:
    """Yield the manifest's entries for a sheet: one per file and phase, and one of kernels."""
    rare = {"without_spikes", "out_of_memory"}
    common = {"device": part.sheet.device, "metric": part.sheet.metric}
    rows = Counter(
        (
            m.configuration.phase,
            part.files[m.attempt_key],
            source_of(m),
            str(m.environment.get("licence", "")),
        )
        for m in part.measurements
        if _is_label(m, part.sheet)
    )
    for (phase, file, source, licence), count in rows.items():
        yield {
            **common,
            "file": file,
            "source": source,
            "phase": phase.value,
            "labels": count,
            **({"licence": licence} if licence else {}),
            **{name: errors for name, errors in part.errors[phase].items() if name in rare},
        }
    for file, kernels in part.kernels.items():
        yield {
            **common,
            "file": file,
            "source": NEUSIGHT if file == KERNELS_FILE else SAILOR,
            "licence": "MIT",
            "labels": len(kernels.workloads),
        }
    prior = part.head.prior
    if isinstance(prior, StepTimePrior) and (part.kernels or part.sheet.measured):
        for file, source, licence, count in LEARNED_FROM:  # where these heads start
            yield {**common, "file": file, "source": source, "licence": licence, "labels": count}


def _select_timed(measurements: Sequence[Measurement], folder: Path, processes: int) -> Samples:
    """Return step times with their kernels, which the prior of time needs."""
    steps = traced_steps(measurements, folder, processes, show_progress)
    rows = []
    for measurement in measurements:
        step = steps.get(key_of(measurement))
        if step is not None and step.kernels is not None and measurement.step_time_ms is not None:
            graph = Graph.empty(measurement.configuration.batch_size)
            host = f"{measurement.device} {measurement.environment.get('run', '')}"
            workload = workload_of(measurement, graph, kernels=step.kernels)
            rows.append((measurement, HostedWorkload.of_host(workload, host)))
    return samples_of(rows, "step_time_ms")


def _fit(
    sheet: LabelSheet, prior: Prior, samples: Samples, rows: np.ndarray[Any, np.dtype[np.int64]]
) -> Head[Prior]:
    generator = np.random.default_rng(SEED)
    head = Ours(prior).fit(samples.at(rows), samples.targets(rows), generator)
    noise = float(np.hypot(head.residual.noise, sheet.hosts_apart))
    return replace(head, residual=replace(head.residual, noise=noise))


def _is_label(measurement: Measurement, sheet: LabelSheet) -> bool:
    """Return whether a measurement has the sheet's metric, or ran out of memory."""
    return getattr(measurement, sheet.metric) is not None or measurement.outcome is not Outcome.OK


def _label(measurement: Measurement, sheet: LabelSheet) -> TrainingLabel:
    value = getattr(measurement, sheet.metric)
    return TrainingLabel(
        configuration_id=measurement.configuration.id,
        device=sheet.device,
        values=tuple(value if metric == sheet.metric else None for metric in METRICS),
        role="train",
        provenance=measurement.provenance.value,
        memory_above_mib=measurement.memory_detail_mib.get("capacity"),
    )


def _cards() -> dict[str, str]:
    """Return the card of each key for which own measurements are more specific than the key."""
    named = {
        sheet.device: card_name(
            sheet.device,
            (m.environment for ms in sheet.labels(data_folder()).values() for m in ms),
        )
        for sheet in SHEETS
        if sheet.measured
    }
    return {key: card for key, card in named.items() if key != card}


def main(
    processes: Processes = CORES,
    to: Annotated[Path, typer.Option(help="Folder to write; it is replaced.")] = SHIPPED,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Sheet whose head alone is trained, by its first file; may be repeated."),
    ] = None,
) -> None:
    """Train the heads and write the snapshot; with --only, the others stay as they ship."""
    sheets = [sheet for sheet in SHEETS if only is None or sheet.files[0] in only]
    if not sheets:
        raise InputError(f"no sheet begins with {only}; name one of research/snapshot")
    trained = [train(sheet, data_folder(), processes) for sheet in sheets]
    kept = SHIPPED if only else None
    info = publish(trained, Home.open().path / "shipping", kept)
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(info.folder, to)
    total = sum(path.stat().st_size for path in to.iterdir())
    print(f"snapshot {info.id}: {to / MANIFEST}, {total:,} bytes in all")
