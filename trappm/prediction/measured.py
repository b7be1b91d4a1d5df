"""Labels of the predicted step, from the label store.

Labels are found by the hash of the graph, so an ONNX file finds labels under any name. A graph is
that of a forward pass in evaluation mode, without dropout or frozen parameters. A label of another
architecture therefore counts for a named one only if both traced steps are equal.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trappm.label_store import store_to_read
from trappm.prediction.models import Module, input_size_of
from trappm.prediction.prediction import MeasuredStep, Prediction
from trappm.profiler.errors import InputError
from trappm.profiler.models.known_names import is_file
from trappm.profiler.records import Configuration, Pair, Phase, Provenance
from trappm.profiler.records.step_scope import PARTIAL_PROTOCOLS
from trappm.profiler.traced_step import TraceKey
from trappm.store.records import record_of

if TYPE_CHECKING:
    from trappm.prediction.models import Subject
    from trappm.profiler.records import GraphTemplate
    from trappm.store import LabelRecord, Store

_SOURCES = (Provenance.MEASURED, Provenance.IMPORTED)
"""Provenances that count, the best first; simulated labels say nothing about a device."""


def with_label(prediction: Prediction) -> Prediction:
    """Return a prediction with the best label of its step, and a remark on it or on its absence.

    Raises:
        StoreError: The label store cannot be read.
    """
    if prediction.subject is None or prediction.snapshot is None:
        return prediction
    measured: MeasuredStep | None = None
    remark: str | None = "No label of this step: labels are of steps of one pass."
    if prediction.accumulation == 1:
        measured, remark = _measured_step(prediction, prediction.subject)
    remarks = (*prediction.remarks, *([remark] if remark else []))
    return replace(prediction, measured=measured, remarks=remarks)


def _measured_step(
    prediction: Prediction, subject: Subject
) -> tuple[MeasuredStep | None, str | None]:
    """Return the best label of the predicted step, and a remark."""
    from trappm.store import NoLabelStoreError

    name = prediction.model
    is_named = not (isinstance(subject, Module) or is_file(name) or Path(name).is_file())
    configuration = Configuration(
        architecture=name,
        batch_size=prediction.batch_size,
        input_size=input_size_of(name, subject.input_size) if is_named else subject.input_size or 1,
        phase=Phase(prediction.phase),
        **prediction.settings._asdict(),
    )
    trace = subject.trace(prediction.settings, configuration.phase, configuration.batch_size)
    try:
        with store_to_read() as store:
            if is_named:
                own = configuration.architecture, configuration.input_size
                pairs = {own} | store.traces.pairs_of_step(TraceKey.of(configuration), trace)
            else:  # of the configuration, only batch size and settings count
                pairs = set() if trace.graph is None else _pairs_of_graph(trace.graph, store)
            labels = _labels(store, pairs, configuration, prediction.device)
            facts = store.measurements.get(labels[0].measurement_id).environment if labels else {}
    except NoLabelStoreError:
        return None, "No label of this step: there is no label store yet."
    except InputError as error:  # no label of this device
        return None, f"No label of this step: {error}."
    if not labels:
        return None, f"No label of this step on {prediction.device}."
    best, remark = labels[0], None
    if not is_named:
        remark = "The label has this graph; dropout and frozen parameters may differ."
    elif best.configuration.architecture != name:
        remark = (
            f"The label is of {best.configuration.architecture}, which has the same graph and "
            "training step."
        )
    measured = record_of(
        MeasuredStep,
        best,
        label_id=best.id,
        label_count=len(labels),
        source=best.provenance.value,
        architecture=best.configuration.architecture,
        compile_s=facts.get("compile_s"),
    )
    return measured, remark


def _labels(
    store: Store, pairs: set[Pair], configuration: Configuration, device: str
) -> list[LabelRecord]:
    """Return the labels of the step, the best first."""
    labels = [
        label
        for label in store.labels.of_pairs(pairs, configuration, device)
        if label.provenance in _SOURCES and label.protocol not in PARTIAL_PROTOCOLS
    ]
    return sorted(
        labels,
        key=lambda label: (
            label.configuration.architecture != configuration.architecture,
            _SOURCES.index(label.provenance),
            label.memory_above_mib is not None,
            -label.id,
        ),
    )


def _pairs_of_graph(graph: GraphTemplate, store: Store) -> set[Pair]:
    """Return architectures and input sizes with the graph of a file or module."""
    batch = graph.fixed_batch_size
    if batch is None:
        return store.traces.pairs_of_graph(graph.content_hash)
    # The file has one batch size only: compare graphs at that one.
    pairs: set[Pair] = set()
    for content_hash, data in store.traces.graphs_of_size(len(graph.operators)).items():
        other = type(graph).from_bytes(data).at(batch)
        if type(graph).fixed(other).content_hash == graph.content_hash:
            pairs.update(store.traces.pairs_of_graph(content_hash))
    return pairs
