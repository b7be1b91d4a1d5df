"""Rows of the board: what `costbench`, the judged heads and sent-in labels have predicted.

Nothing is evaluated here. Rows of published tools are those of `costbench`. Rows of label sheets
are those that the shipped heads are judged on: a fifth of the architectures, which the head has not
learned from. Labels that users sent in are predicted by the shipped snapshot.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from research import costbench, data
from research.costbench import PublishedSheet
from research.evaluation.benchmark import PAPER_SEEDS
from research.importers import public
from research.peers.cost_models import MIB_PER_GIB, Figure
from research.snapshot.default_snapshot import PreparedSheet, prepare, source_of
from research.snapshot.shipped_sheets import SHEETS, LabelSheet
from trappm import predict
from trappm.label_store import store_or_none_yet
from trappm.prediction.models import size_kind
from trappm.prediction.selection import device_title
from trappm.profiler.devices.catalogue import known_spec
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.models.families import family_of
from trappm.profiler.models.known_names import has_public_name
from trappm.profiler.records import Configuration, Measurement, Phase
from trappm.store import Home, LabelFilter

OWN_LICENCE = "as this project"
MS, MIB = "ms", "MiB"
METRICS = {"step_time_ms": ("step", MS), "memory_mib": ("memory", MIB)}
PHASES = {Phase.TRAIN: "training", Phase.INFER: "inference"}
PEERS = {"prior": "physics alone", "xgboost": "XGBoost"}
"""Predictors that are judged next to the heads, by their titles on the page."""
NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class BoardRow:
    """A measured quantity and its predictions, in the unit of the row."""

    card: str
    kind: str
    """Family of the model."""
    model: str
    quantity: str
    """Such as `training step`."""
    unit: str
    """`ms` or `MiB`."""
    measured: float
    predicted: float
    low: float = NAN
    high: float = NAN
    """Bounds of the 90 % interval; NaN without one."""
    peers: Mapping[str, float] = field(default_factory=dict)
    """Predictions of others by their names."""

    @property
    def error(self) -> float:
        """Return |predicted / measured - 1| in percent."""
        return 100 * abs(self.predicted / self.measured - 1)


@dataclass(frozen=True, kw_only=True)
class BoardSheet:
    """Rows of one source, who measured them, and how they are to be read."""

    title: str
    sources: Sequence[str]
    """Who measured."""
    licence: str
    total: int
    """Number of rows that the source has, or quantities that the tools were run on."""
    rows: Sequence[BoardRow]
    fitted: str = ""
    """Constants that were fitted to these rows; empty for held-out rows."""
    note: str = ""
    spread: float = NAN
    """Median difference in percent between repeated measurements; NaN without repeats."""


@dataclass(frozen=True)
class LeftOut:
    """A sheet that is not shown, and the reason."""

    title: str
    reason: str


Part = Callable[[], "BoardSheet | LeftOut"]


def parts(most: int | None, processes: int) -> dict[str, Part]:
    """Return what makes each sheet of the board, by name.

    Args:
        most: Number of labels of each label sheet; None for all.
        processes: Number of processes that trace.
    """
    made: dict[str, Part] = {
        name: partial(published_rows, name, sheet) for name, sheet in costbench.SHEETS.items()
    }
    for labels in SHEETS:
        phases = " and ".join(PHASES[phase] for phase in labels.phases)
        title = f"{labels.device}, {phases}, {METRICS[labels.metric][0]}"
        made[title] = partial(judged_rows, title, labels, most, processes)
    for (source, device), received in sent_in().items():
        made[f"{source}, {device}"] = partial(sent_in_rows, source, device, received)
    return made


def gathered(wanted: Mapping[str, Part]) -> Iterator[BoardSheet | LeftOut]:
    """Make each sheet, with a line of progress on standard error."""
    begun = time.monotonic()
    for number, (title, make) in enumerate(wanted.items(), 1):
        sheet = make()
        seconds = time.monotonic() - begun
        left_s = seconds / number * (len(wanted) - number)
        made = f"{len(sheet.rows)} rows" if isinstance(sheet, BoardSheet) else sheet.reason
        sys.stderr.write(
            f"{number}/{len(wanted)} {title}: {made}; {seconds:.0f} s, about {left_s:.0f} s left\n"
        )
        yield sheet


def published_rows(name: str, sheet: PublishedSheet) -> BoardSheet | LeftOut:
    """Return the rows of a sheet of `costbench` that TraPPM predicts, with those of its tools."""
    entry = data.sheets()[sheet.file]
    if not data.may_be_shown(entry["licence"]):
        return LeftOut(name, f"licence: {entry['licence']}")
    table, source = sheet.rows(data.data_folder()), entry["source"]
    sources = [source] if isinstance(source, str) else [x for x in source if name in x]
    ours, *_ = (tool.name for tool in sheet.tools)
    by_row: dict[tuple[str, int], dict[str, costbench.ToolOutcome]] = defaultdict(dict)
    for outcome in costbench.outcomes(sheet, table):
        by_row[outcome.quantity, outcome.row][outcome.tool] = outcome
    rows = []
    for (title, number), by_tool in by_row.items():
        outcome = by_tool[ours]
        if outcome.failure:
            continue
        quantity, _, unit = title.rpartition(", ")
        factor = MIB_PER_GIB if unit == "GiB" else 1
        row = table.iloc[number]
        model = str(row[sheet.model])
        rows.append(
            BoardRow(
                card=_title(str(row.get(sheet.card, sheet.card))),
                kind=family_of(model if has_public_name(model) else f"hf:{model.lower()}"),
                model=model,
                quantity=quantity.partition(" of ")[0],
                unit=MS if unit == MS else MIB,
                measured=factor * outcome.measured,
                predicted=factor * outcome.figure.value,
                low=factor * outcome.figure.low,
                high=factor * outcome.figure.high,
                peers={
                    tool: factor * other.figure.value
                    for tool, other in by_tool.items()
                    if tool != ours and not other.failure
                },
            )
        )
    return BoardSheet(
        title=name,
        sources=sources,
        licence=entry["licence"],
        total=len(by_row),
        rows=rows,
        fitted=sheet.fitted,
    )


def judged_rows(
    title: str, sheet: LabelSheet, most: int | None, processes: int
) -> BoardSheet | LeftOut:
    """Return the held-out rows of a label sheet, predicted by the head without them."""
    published = sheet.published if sheet.measured else sheet.files
    licences = {data.sheets()[f]["licence"] for f in published}
    if sheet.measured:
        licences.add(OWN_LICENCE)
    refused = [x for x in licences if x != OWN_LICENCE and not data.may_be_shown(x)]
    if refused:
        return LeftOut(title, f"licence: {', '.join(refused)}")
    folder = data.data_folder() if published else data.ROOT
    total = sum(len(labels) for labels in sheet.labels(folder).values())
    part = prepare(sheet, folder, processes, most)
    samples, ours = part.samples, dict[int, Figure]()
    held: list[set[str]] = []
    for seed in PAPER_SEEDS:
        head, test = part.judged(seed)
        estimate = head.predict(samples.at(test))
        assert estimate.low is not None and estimate.high is not None  # noqa: PT018
        figures = map(Figure, estimate.median, estimate.low, estimate.high)
        ours = dict(zip(test.tolist(), figures, strict=True)) | ours
        held.append({samples.configurations[i].architecture for i in test})
    peers = _peers(part, held)
    what, unit = METRICS[sheet.metric]
    rows = [
        BoardRow(
            card=_title(sheet.device),
            kind=family_of(configuration.architecture),
            model=str(configuration),
            quantity=f"{PHASES[configuration.phase]} {what}",
            unit=unit,
            measured=float(samples.values[i]),
            predicted=float(figure.value),
            low=float(figure.low),
            high=float(figure.high),
            peers={
                name: known[configuration]
                for name, known in peers.items()
                if configuration in known
            },
        )
        for i, figure in sorted(ours.items())
        if samples.judged[i]
        for configuration in [samples.configurations[i]]
    ]
    return BoardSheet(
        title=title,
        sources=sorted({source_of(m) for m in part.measurements}),
        licence=", ".join(sorted(licences)),
        total=total,
        rows=rows,
        note=f"architectures held out of training, from {len(samples)} labels",
        spread=_spread(part),
    )


def _peers(part: PreparedSheet, held: Sequence[set[str]]) -> dict[str, dict[Configuration, float]]:
    """Return the predictions of `PEERS` by their titles, for the first draw that holds out a row.

    Peers learn from graphs of one device, so a sheet of several has none.
    """
    try:
        prepared = part.bench.prepared(part.measurements)
    except InputError:
        return {}
    samples, made = prepared.samples, dict[str, dict[Configuration, float]]()
    names = np.array(samples.architectures)
    for name, title in PEERS.items():
        estimator, known = part.bench.estimator(name, prepared), dict[Configuration, float]()
        for seed, architectures in zip(PAPER_SEEDS, held, strict=True):
            test = np.isin(names, list(architectures))
            rows = np.flatnonzero(~test)
            generator = np.random.default_rng(seed)
            model = estimator.fit(samples.at(rows), samples.targets(rows), generator)
            judged = np.flatnonzero(test)
            medians = model.predict(samples.at(judged)).median.tolist()
            known = (
                dict(zip((samples.configurations[int(i)] for i in judged), medians, strict=True))
                | known
            )
        made[title] = known
    return made


def _spread(part: PreparedSheet) -> float:
    """Return the median difference of repeats on a host's devices in percent; NaN without any."""
    values: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for m in part.measurements:
        value = getattr(m, part.sheet.metric)
        if value is not None:
            values[m.configuration, m.device, m.environment.get("cpu_model")].append(value)
    gaps = [100 * (max(each) / min(each) - 1) for each in values.values() if len(each) > 1]
    return float(np.median(gaps)) if gaps else NAN


def sent_in() -> dict[tuple[str, str], list[Measurement]]:
    """Return the labels that users sent in and that may be shown, by source and device."""
    by_source: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    with store_or_none_yet(Home.find()) as store:
        for label in store.measurements.each(LabelFilter(provenance="imported")):
            facts = label.environment
            if facts.get(public.KEY) is True and data.may_be_shown(str(facts.get("licence"))):
                by_source[str(facts["source"]), label.device].append(label)
    return by_source


def sent_in_rows(source: str, device: str, labels: Sequence[Measurement]) -> BoardSheet:
    """Return labels of a user's device, predicted by the shipped snapshot."""
    rows, failures = [], 0
    for label in labels:
        what = label.configuration
        size = "sequence_length" if size_kind(what.architecture) == "tokens" else "input_size"
        try:
            step = predict(
                what.architecture, device=device, batch_size=what.batch_size,
                phase=what.phase, precision=what.precision, memory_format=what.memory_format,
                optimizer=what.optimizer, execution=what.execution, snapshot="default",
                **{size: what.input_size},  # type: ignore[arg-type]
            )  # fmt: skip
        except TrappmError:
            failures += 1
            continue
        for metric, (name, unit) in METRICS.items():
            measured, predicted = getattr(label, metric), getattr(step, metric)
            if measured is not None and predicted is not None:
                low, high = step.intervals[metric]
                rows.append(
                    BoardRow(
                        card=_title(device),
                        kind=family_of(what.architecture),
                        model=str(what),
                        quantity=f"{PHASES[what.phase]} {name}",
                        unit=unit,
                        measured=measured,
                        predicted=predicted,
                        low=low,
                        high=high,
                    )
                )
    return BoardSheet(
        title=f"{source}, {device}",
        sources=[source],
        licence=", ".join(sorted({str(label.environment["licence"]) for label in labels})),
        total=len(labels),
        rows=rows,
        note=f"sent in; {failures} not predicted" if failures else "sent in",
    )


def _title(device: str) -> str:
    key = device.lower().replace("_", "-")
    return device_title(key) if known_spec(key) is not None or key.startswith("cpu-") else device
