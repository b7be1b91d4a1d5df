"""Labels of the step that a prediction is about, from the label store.

Labels are found by the hash of the graph, so an ONNX file finds labels under any name. A graph is
that of a forward pass in evaluation mode, without dropout or frozen parameters. A label of another
architecture therefore counts for a named one only if the profiles of both training steps are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trappm.label_store import store_to_read
from trappm.prediction.prediction import MeasuredStep, Prediction
from trappm.profiler.errors import InputError
from trappm.profiler.models.known_names import is_file
from trappm.profiler.records import (
    Configuration,
    Pair,
    Phase,
    Provenance,
)
from trappm.profiler.records.step_scope import PARTIAL_PROTOCOLS

if TYPE_CHECKING:
    from trappm.prediction.models.subjects import Subject
    from trappm.profiler.records.graph import GraphTemplate
    from trappm.store import LabelRecord, Store

_SOURCES = (Provenance.MEASURED, Provenance.IMPORTED)
"""Labels that count, the best first. Simulated ones say nothing about a device."""


def with_label(prediction: Prediction) -> Prediction:
    """Return a prediction with the best label of its step, and a remark on it or on its absence.

    Raises:
        StoreError: The label store cannot be read.
    """
    measured, remark = _measured_step(prediction)
    remarks = (*prediction.remarks, *([remark] if remark else []))
    return replace(prediction, measured=measured, remarks=remarks)


def _measured_step(prediction: Prediction) -> tuple[MeasuredStep | None, str | None]:
    """Return the best label of the predicted step, and a remark."""
    from trappm.store import NoLabelStoreError

    if prediction.subject is None or prediction.snapshot is None:
        return None, None
    try:
        store = store_to_read()
    except NoLabelStoreError:
        return None, "No label of this step: there is no label store yet."
    with store:
        try:
            search = _LabelSearch.of(prediction, prediction.subject)
            labels = search.labels(store)
        except InputError as error:  # no label of this device
            return None, f"No label of this step: {error}."
    if not labels:
        return None, f"No label of this step on {prediction.device}."
    best = labels[0]
    name = best.configuration.architecture
    remark = None
    if search.graph is not None:
        remark = "The label has this graph; dropout and frozen parameters may differ."
    elif name != prediction.model:
        remark = f"The label is of {name}, which has the same graph and training step."
    return MeasuredStep(
        label_id=best.id,
        label_count=len(labels),
        source=best.provenance.value,
        architecture=name,
        protocol=best.protocol,
        step_time_ms=best.step_time_ms,
        memory_mib=best.memory_mib,
        memory_above_mib=best.memory_above_mib,
        power_w=best.power_w,
    ), remark


@dataclass(frozen=True, kw_only=True)
class _LabelSearch:
    """A search for labels of one step."""

    subject: Subject
    device: str
    configuration: Configuration
    """Of a file or module, only batch size and settings count."""
    graph: GraphTemplate | None
    """Graph of a file or module; None for an architecture."""

    @classmethod
    def of(cls, prediction: Prediction, subject: Subject) -> _LabelSearch:
        from trappm.prediction.models.subjects import Module, input_size_of

        name, graph = prediction.model, None
        if isinstance(subject, Module) or is_file(name) or Path(name).is_file():
            graph, size = subject.profile().graph, subject.input_size or 1
        else:
            size = input_size_of(name, subject.input_size)
        configuration = Configuration(
            architecture=name,
            batch_size=prediction.batch_size,
            input_size=size,
            phase=Phase(prediction.phase),
            **prediction.settings._asdict(),
        )
        return cls(
            subject=subject, device=prediction.device, configuration=configuration, graph=graph
        )

    def labels(self, store: Store) -> list[LabelRecord]:
        """Return the labels of the step, the best first."""
        labels = [
            label
            for label in store.labels.of_pairs(self._pairs(store), self.configuration, self.device)
            if label.provenance in _SOURCES and label.protocol not in PARTIAL_PROTOCOLS
        ]
        return sorted(
            labels,
            key=lambda x: (
                x.configuration.architecture != self.configuration.architecture,
                _SOURCES.index(x.provenance),
                x.memory_above_mib is not None,
                -x.id,
            ),
        )

    def _pairs(self, store: Store) -> set[Pair]:
        """Return architectures and input sizes that have the step in question."""
        if self.graph is not None:
            return self._pairs_of_graph(self.graph, store)
        from trappm.profiler.records.graph import GraphTemplate

        own = (self.configuration.architecture, self.configuration.input_size)
        templates = store.workloads.graph_templates([own])
        if templates:
            graph = GraphTemplate.from_bytes(templates[own])
            pairs = store.workloads.pairs_of_graph(graph.content_hash)
            profiles = store.workloads.step_profiles([own, *pairs])
            step = profiles.get(own)
        else:  # the store has no profile of it
            profile = self.subject.profile()
            pairs = store.workloads.pairs_of_graph(profile.graph.content_hash)
            profiles = store.workloads.step_profiles(pairs)
            step = None if profile.step is None else profile.step.to_bytes()
        same = {pair for pair in pairs if step is not None and profiles.get(pair) == step}
        return {own, *same}

    @staticmethod
    def _pairs_of_graph(graph: GraphTemplate, store: Store) -> set[Pair]:
        """Return architectures and input sizes with the graph of a file or module."""
        wanted, batch = graph.content_hash, graph.fixed_batch_size
        if batch is None:
            return set(store.workloads.pairs_of_graph(wanted))
        # The file has one batch size only: compare graphs at that one.
        pairs: set[Pair] = set()
        for content_hash, data in store.workloads.graphs_of_size(len(graph.operators)).items():
            other = type(graph).from_bytes(data).at(batch)
            if type(graph).fixed(other).content_hash == wanted:
                pairs.update(store.workloads.pairs_of_graph(content_hash))
        return pairs
