"""`trappm.lookup`: what a step costs, from the label store if it was measured, predicted if not.

Labels are found by the hash of the graph: those of an ONNX file under whatever name they were
measured. A graph is of a forward pass in evaluation mode and does not tell of dropout or frozen
parameters, so a label of another architecture answers for a named one only where the profiles of
both training steps are equal too; for a file, which has no such profile, the answer says so.

What was answered from a SQLite file is kept until that file changes (`kept_answers`); no file shows
whether another database did, so that is always asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.call_arguments import checked_call
from trappm.label_store import store_to_read
from trappm.prediction.device_names import DEFAULT_DEVICE
from trappm.prediction.kept_answers import kept_answers
from trappm.prediction.looking_up.answer import Answer
from trappm.prediction.models.profile_cache import content_key
from trappm.prediction.models.sizes import check_size, size_kind, size_of
from trappm.profiler.errors import InputError, SnapshotError, TrappmError
from trappm.profiler.models.known_names import content_of, is_file, refuse_unknown
from trappm.profiler.records import Configuration, Pair, Protocol, Provenance
from trappm.profiler.records.step_scope import PARTIAL_PROTOCOLS
from trappm.store.home import Home

if TYPE_CHECKING:
    from trappm.profiler.records.graph import GraphTemplate
    from trappm.store import LabelRecord, Store


_ANSWERS = (Provenance.MEASURED, Provenance.IMPORTED)
"""Labels that answer, the best first; simulated ones are no knowledge about a device."""

_NEAREST = 3
"""So many labelled settings are listed where none fits."""

_SETTINGS = ("precision", "memory_format", "optimizer", "phase")


@checked_call
def lookup(
    model: str | Path,
    *,
    device: str | None = None,
    batch_size: int | None = None,
    input_size: int | None = None,
    sequence_length: int | None = None,
    snapshot: str | Path | None = None,
    measure: bool = False,
    protocol: str | Protocol | None = None,
    precision: str | None = None,
    memory_format: str | None = None,
    optimizer: str | None = None,
    phase: str | None = None,
) -> Answer:
    """What a step of a model costs: measured if the label store has it, predicted otherwise.

    Args:
        model: a timm name, a transformer's (`hf:gpt2`), or the path of an ONNX file.
        device: Its key; `DEFAULT_DEVICE` by default.
        batch_size: samples a step; by default the file's own, or 1.
        input_size: pixels; by default the architecture's own, or what the file says.
        sequence_length: tokens, instead of pixels, of a transformer of text.
        snapshot: what predicts, as in `trappm.predict`.
        measure: where there is no label, measure a timm architecture on this machine and keep the
            result; instead of predicting.
        protocol: for that, or its name; by default `quick` on CPU devices and `paper` on others.
        precision, memory_format, optimizer, phase: by default as `Configuration` has them.

    Raises:
        UnknownArchitectureError: no such timm architecture.
        ModelFileError: the file is not an ONNX model that we can read.
        SnapshotError: there is no label, and no snapshot that could predict.
        DeviceError: it is to be measured, and there is no such device here.
        InputError: a size or setting that cannot be, or a file that is to be measured.
        TrappmError: it was measured, and that gave no label.
    """
    if not isinstance(model, str | Path):
        raise InputError(
            f"the model is a {type(model).__name__}; labels are of names and files: for a module "
            "call trappm.predict(module, example_input=images)"
        )
    size = size_of(str(model), input_size, sequence_length)
    given = dict(zip(_SETTINGS, (precision, memory_format, optimizer, phase), strict=True))
    settings = {name: value for name, value in given.items() if value is not None}

    def look() -> Answer:
        inquiry = _Inquiry.about(model, batch_size, size, settings)
        key = device or DEFAULT_DEVICE
        rule = _rule(protocol, key)
        labels = inquiry.labels(key)
        if not labels and measure:
            labels = [inquiry.measured(key, rule)]
        return inquiry.answer(key, labels) if labels else inquiry.predicted(device, snapshot)

    home = Home.find()
    if measure or home.database_files is None:
        return look()
    named = isinstance(model, str) and not is_file(model)
    question = {
        "looked_up": model,
        "content": content_of(str(model)) if named else content_key(Path(model)),
        "size": size,
        "batch_size": batch_size,
        "device": device,
        "snapshot": snapshot,
        "protocol": protocol,
        **settings,
    }
    (answer,) = kept_answers(
        question,
        lambda: [look()],
        write=Answer.to_kept,
        read=Answer.from_kept,
        rests_on=lambda: home.database_files or (),
    )
    return answer


@dataclass(frozen=True, kw_only=True)
class _Inquiry:
    """The question, with all that is known of the model."""

    model: str
    file: GraphTemplate | None
    """What a file holds; None for an architecture."""
    input_size: int | None
    """In pixels, as the caller gave it."""
    what: Configuration
    """To measure, of an architecture; of a file only batch size and settings count."""
    settings: Mapping[str, str]
    """The settings that the question names."""

    @classmethod
    def about(
        cls,
        model: str | Path,
        batch_size: int | None,
        input_size: int | None,
        settings: Mapping[str, str],
    ) -> _Inquiry:
        check_size("batch size", batch_size)
        check_size("input size", input_size)
        name = str(model)
        if isinstance(model, Path) or is_file(name):
            from trappm.prediction.models.subjects import subject_of

            file = subject_of(Path(model), input_size=input_size).profile().graph
            batch = batch_size or file.fixed_batch_size or 1
            file.at(batch)  # or the file has another, fixed one
            size = input_size or 1
        else:
            refuse_unknown(name)
            from trappm.prediction.models.subjects import input_size_of

            file, batch, size = None, batch_size or 1, input_size_of(name, input_size)
        values: Any = settings
        what = Configuration(architecture=name, batch_size=batch, input_size=size, **values)
        return cls(model=name, file=file, input_size=input_size, what=what, settings=settings)

    def labels(self, device: str) -> list[LabelRecord]:
        """The labels that answer, the best first."""
        store = _store_if_any()
        if store is None:
            return []
        with store:
            answer = self._labels(store, device)
        answering = [
            label
            for label in answer
            if label.provenance in _ANSWERS and label.protocol not in PARTIAL_PROTOCOLS
        ]
        return sorted(
            answering,
            key=lambda x: (
                x.configuration.architecture != self.model,
                _ANSWERS.index(x.provenance),
                x.memory_above_mib is not None,
                -x.id,
            ),
        )

    def _labels(self, store: Store, device: str) -> list[LabelRecord]:
        if self.file is not None:
            return store.labels.of_pairs(self._pairs_of_file(self.file, store), self.what, device)
        own = (self.model, self.what.input_size)
        pairs = store.workloads.pairs_of_same_graph(*own)
        if pairs:
            profiles = store.workloads.step_profiles([own, *pairs])
            step = profiles.get(own)
        else:  # it has no profile yet
            labels = store.labels.of_pairs([own], self.what, device)
            if labels:
                return labels
            from trappm.prediction.models.subjects import subject_of

            profile = subject_of(self.model, input_size=self.input_size).profile()
            pairs = store.workloads.pairs_of_graph(profile.graph.content_hash)
            profiles = store.workloads.step_profiles(pairs)
            step = None if profile.step is None else profile.step.to_bytes()
        same = {pair for pair in pairs if step is not None and profiles.get(pair) == step}
        return store.labels.of_pairs({own, *same}, self.what, device)

    def _pairs_of_file(self, file: GraphTemplate, store: Store) -> set[Pair]:
        """Architectures and input sizes with the graph of a file."""
        wanted, batch = file.content_hash, file.fixed_batch_size
        if batch is None:
            return set(store.workloads.pairs_of_graph(wanted))
        # The file knows one batch size only; which graphs that we have become it at that one?
        pairs: set[Pair] = set()
        for content_hash, data in store.workloads.graphs_of_size(len(file.operators)).items():
            graph = type(file).from_bytes(data).at(batch)
            if type(file).fixed(graph).content_hash == wanted:
                pairs.update(store.workloads.pairs_of_graph(content_hash))
        return pairs

    def answer(self, device: str, labels: list[LabelRecord]) -> Answer:
        best = labels[0]
        measured = best.configuration.architecture
        remark = None
        if self.file is not None:
            remark = (
                f"measured as {measured}, which has the same graph; a file does not tell of "
                "dropout or frozen parameters"
            )
        elif measured != self.model:
            remark = f"measured as {measured}, which has the same graph and training step"
        return Answer(
            model=self.model,
            device=device,
            batch_size=self.what.batch_size,
            source=best.provenance.value,
            step_time_ms=best.step_time_ms,
            memory_mib=best.memory_mib,
            memory_above_mib=best.memory_above_mib,
            power_w=best.power_w,
            labels=tuple(labels),
            prediction=None,
            remark=remark,
        )

    def hints(self, device: str) -> list[str]:
        """What there is on this device instead, and what a file could not be compared with."""
        store = _store_if_any()
        if store is None:
            return []
        with store:
            try:
                alike = store.labels.pairs(device, like=self.what)
            except InputError as error:  # no such device; the error names the nearest
                return [str(error)]
            hints = []
            pairs = set() if self.file is None else self._pairs_of_file(self.file, store)
            names = [self.model] if self.file is None else [name for name, _ in pairs]
            there = [
                what for what in store.labels.configurations(names, device)
                if self.file is None or (what.architecture, what.input_size) in pairs
            ]  # fmt: skip
            if there:
                nearest = sorted(there, key=self._distance)[:_NEAREST]
                hints.append(f"the nearest labels there: {'; '.join(map(str, nearest))}")
            if self.file is not None and (unprofiled := store.workloads.pairs_to_profile(alike)):
                hints.append(
                    f"{len(unprofiled):,} architectures with such labels there have no graph "
                    "to compare the file with; build a pool that contains them: trappm pool build"
                )
        return hints

    def _distance(self, other: Configuration) -> tuple[int, float, float]:
        """How far another configuration of the same model is from what is asked."""
        what = self.what
        size = what.input_size if self.file is None else other.input_size
        return (
            sum(getattr(what, name) != getattr(other, name) for name in _SETTINGS),
            abs(math.log(other.input_size / size)),
            abs(math.log(other.batch_size / what.batch_size)),
        )

    def measured(self, device: str, rule: Protocol) -> LabelRecord:
        """The label of a measurement taken now."""
        if self.file is not None:
            raise InputError(f"no label of {self.model} there, and only timm names can be measured")
        from trappm.profiler.devices import open_device
        from trappm.profiler.measuring.isolation import Measurer
        from trappm.store import Home, Store

        open_device(device)  # before anything is begun
        with Store.open(Home.open().database_url) as store, Measurer() as measurer:
            measurement = measurer.measure(self.what, device, rule)
            recorded = store.measurements.record(measurement)
            if recorded.label_id is not None:
                return store.labels.get(recorded.label_id)
        where = f" in {measurement.failed_in}" if measurement.failed_in else ""
        raise TrappmError(
            f"measuring {self.what} on {device} ended as {measurement.outcome}{where}: "
            f"{measurement.message}; the attempt is kept as number {recorded.measurement_id}"
        )

    def predicted(self, device: str | None, snapshot: str | Path | None) -> Answer:
        from trappm.prediction.predict import predict

        key = device or DEFAULT_DEVICE
        missing = f"no label of {self.model} at batch {self.what.batch_size} on {key}"
        hints = self.hints(key)
        reasons = "".join(f" ({hint})" for hint in hints)
        size = "sequence_length" if size_kind(self.model) == "tokens" else "input_size"
        # What is left at its default is predicted as most labels of the device had it.
        settings: Any = {size: self.input_size, **self.settings}
        try:
            prediction = predict(
                self.model if self.file is None else Path(self.model),
                batch_size=self.what.batch_size,
                device=device,
                snapshot=snapshot,
                **settings,
            )
        except SnapshotError as error:
            raise SnapshotError(f"{missing}{reasons}, and no prediction: {error}") from error
        others = [
            f"{name} {getattr(prediction, name)}" for name in _SETTINGS
            if getattr(prediction, name) != getattr(self.what, name)
        ]  # fmt: skip
        if others:
            hints.append(f"predicted with {', '.join(others)}, as in most labels of the device")
        return Answer(
            model=self.model,
            device=key,
            batch_size=prediction.batch_size,
            source="predicted",
            step_time_ms=prediction.step_time_ms,
            memory_mib=prediction.memory_mib,
            memory_above_mib=None,
            power_w=prediction.power_w,
            labels=(),
            prediction=prediction,
            remark="; ".join(hints) or None,
        )


def _store_if_any() -> Store | None:
    """The label store, to read; None where nothing was ever recorded."""
    from trappm.store import NoLabelStoreError

    try:
        return store_to_read()
    except NoLabelStoreError:
        return None


def _rule(protocol: str | Protocol | None, device: str) -> Protocol:
    """The protocol to measure by; looked up even where unneeded, to catch misspelt names."""
    from trappm.profiler.measuring.protocols import PROTOCOLS, protocol_named
    from trappm.profiler.nearest import nearest
    from trappm.profiler.records import is_cpu_device

    rule = protocol or ("quick" if is_cpu_device(device) else "paper")
    if not isinstance(rule, str):
        return rule
    if rule not in PROTOCOLS:
        raise InputError(f"no protocol is named {rule!r}; {nearest(rule, [*PROTOCOLS])}")
    return protocol_named(rule)
