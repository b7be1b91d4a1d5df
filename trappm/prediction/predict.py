"""`trappm.predict` and `trappm.compare`: what a step takes on a device, and on several.

Predictions are cached, so that a repeated question is answered without torch. An entry is named by
all that its predictions depend on: the question, the models' contents, this code, the libraries
that trace, the snapshots and the prices. A damaged entry is made again, a folder that cannot be
written caches nothing, and deleting it loses nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast

from trappm.learner.snapshots.manifest import MANIFEST
from trappm.prediction.cost import FILE as PRICES
from trappm.prediction.models import size_kind, subject_of
from trappm.prediction.prediction import Prediction
from trappm.prediction.question import Question, QuestionSettings
from trappm.prediction.selection import Selection
from trappm.profiler.devices.catalogue import OWN_CARDS
from trappm.profiler.errors import InputError, UnsupportedModelError, is_of_this_machine
from trappm.profiler.extensions import extension_folders
from trappm.profiler.files import write_atomically
from trappm.profiler.host.environment import (
    data_folder,
    independent_of_caller,
    library_versions,
    uses_fused_attention,
)
from trappm.profiler.models.known_names import is_file, refuse_unknown
from trappm.profiler.records import Execution

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trappm.prediction.models import Subject

_P = ParamSpec("_P")
_T = TypeVar("_T")


def with_settings(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Show the settings in the signature of a function with `**settings`, and check calls by it."""
    own = inspect.signature(function)
    parameters = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, kind in QuestionSettings.__annotations__.items():
        default = "train" if name == "phase" else None
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=kind.__forward_arg__,
            )
        )
    signature = own.replace(parameters=parameters)

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        return function(*args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


@with_settings
@independent_of_caller
def predict(
    model: str | Path | nn.Module,
    *,
    device: str | None = None,
    input_size: int | None = None,
    sequence_length: int | None = None,
    execution: str | None = None,
    example_input: Any = None,
    targets: Any = None,
    loss: Callable[..., Tensor] | None = None,
    labels: bool = False,
    trace_seconds: float | None = None,
    **settings: Unpack[QuestionSettings],
) -> Prediction:
    """Predict time, memory, power and energy of a step, and what fits.

    >>> import torch
    >>> module, images = torch.nn.Linear(784, 10), torch.empty(64, 784)
    >>> classes = torch.zeros(64, dtype=torch.long)
    >>> predict(module, example_input=images, targets=classes, optimizer="adamw").fits
    True

    Args:
        model: A timm name, a transformer such as `hf:gpt2`, the path of an ONNX file, or a module.
            The module stays as it is.
        device: Device by any of its names (default: `DEFAULT_DEVICE`).
        batch_size: Samples per step (default: that of the example or the file, or 1).
        input_size: Pixels, for timm names and files (default: the model's own).
        sequence_length: Tokens, for transformers (default: the model's maximum, up to 2,048) and
            for files with an open length.
        phase: `train` or `infer`.
        precision: `fp32`, `tf32`, `fp32-strict`, `amp-fp16`, `amp-bf16` or `bf16` (default: that
            of most labels).
        memory_format: `contiguous` or `channels-last` (default: that of most labels).
        optimizer: `sgd`, `momentum`, `adam` or `adamw`; a class or an object of `torch.optim`; or
            a `trappm.TrainingLoop`, which has fused optimizers, too (default: that of
            most labels). An object that was made of a module's parameters is read by its groups.
        accumulation: Forward and backward passes per optimizer step, each of `batch_size` samples
            (default: that of the training loop, or 1).
        execution: `eager` or `compile` (default: `compile` for what `torch.compile` returned).
            Of compiled steps, step time and memory on GPUs are predicted.
        snapshot: Id, alias or folder (default: the device's latest, then the shipped one).
        example_input: Input of a module: a tensor, a tuple of positional inputs, or a mapping of
            keyword inputs. Only shapes, types and whole numbers are read. The first axis of the
            first tensor is the batch. A last positional input that `forward()` does not accept is
            taken as the targets.
        targets: What the loss compares the output of a module with. It follows the batch. A module
            whose `forward()` has an argument of this name gets it.
        loss: Function of the output of a module, and of the targets if there are any, that returns
            a scalar (default: the module's own `output.loss`; else cross-entropy, or the mean
            squared error for floating-point targets).
        epochs, samples: Number of epochs, and of samples per epoch, of a run (`Prediction.run`).
        carbon_g_per_kwh: Carbon intensity of the electricity, for the CO2 of a run.
        power_limit_w: GPU power limit in watts (default: factory setting).
        usd_per_hour: Price of the device, for the cost of a run (default: the known prices).
        labels: Look for labels of this step in the label store (`Prediction.measured`).
        trace_seconds: Limit for tracing a file, and for running a module on the CPU if its
            operators depend on the values of its inputs (default: 120).

    Returns:
        The prediction. The reason for each missing value is in `Prediction.missing`.

    Raises:
        UnknownArchitectureError: There is no such timm architecture.
        ModelFileError: The file is not an ONNX model that TraPPM can read.
        SnapshotError: There is no such snapshot, or it has no model of the device.
        InputError: A wrong setting, or a size or inputs that the model cannot have.
        UnsupportedModelError: The model cannot be traced; with the reason.
        TraceTimeoutError: That took more than `trace_seconds`.
    """
    if not isinstance(model, str | Path) and not hasattr(model, "forward"):
        raise InputError(
            f"the model is a {type(model).__name__}; give one model to predict(), or a list of "
            "them to trappm.compare()"
        )
    question = Question(
        execution=_execution_of(model) if execution is None else execution, **settings
    )
    selection = Selection(question)
    keys = selection.device_keys(device, None)
    subject = subject_of(
        model,
        example_input=example_input,
        targets=targets,
        loss=loss,
        input_size=input_size,
        sequence_length=sequence_length,
        trace_seconds=trace_seconds,
    )
    [prediction] = _predictions(selection, [subject], keys, labels=labels)
    if not isinstance(model, str | Path):
        from trappm.prediction.answer import remarks_on_module

        remarks = remarks_on_module(model, question.execution)
        prediction = replace(prediction, remarks=(*prediction.remarks, *remarks))
    return prediction


def _execution_of(model: object) -> Execution:
    """Return how a model runs: compiled if `torch.compile` or `compile()` made it so."""
    is_compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None)
    return Execution.COMPILE if is_compiled else Execution.EAGER


@with_settings
@independent_of_caller
def compare(
    models: str | Path | nn.Module | Sequence[str | Path | nn.Module],
    devices: str | Sequence[str] | None = None,
    *,
    input_size: int | None = None,
    sequence_length: int | None = None,
    example_input: Any = None,
    labels: bool = False,
    executions: Sequence[str] = (Execution.EAGER,),
    **settings: Unpack[QuestionSettings],
) -> list[Prediction]:
    """Predict a step of several models, or on several devices.

    Args:
        models: Models as `predict` takes them.
        devices: Devices by any of their names; None or "all" for all GPUs with heads for this
            phase that can run the precision.
        input_size: Pixels of the models that take images.
        sequence_length: Tokens of the models that take text.
        batch_size, phase, precision, memory_format, optimizer, accumulation, snapshot: As for
            `predict`.
        example_input: Input of the modules among the models.
        epochs, samples, carbon_g_per_kwh, power_limit_w, usd_per_hour, labels: As for `predict`.
        executions: `eager`, `compile` or both, next to each other.

    Returns:
        All devices of the first model, then those of the next. A device that cannot run the
        precision has no values; the reason is in `Prediction.missing`.

    Raises:
        TrappmError: As `predict`.
    """
    is_one = isinstance(models, str | Path) or hasattr(models, "forward")
    named: list[Any] = [models] if is_one else list(cast("Sequence[Any]", models))
    if not named:
        raise InputError("the list of models is empty")
    for model in named:  # all names before the first model is traced
        if isinstance(model, str) and not is_file(model):
            refuse_unknown(model)
    selections = [Selection(Question(execution=how, **settings)) for how in executions]
    keys = selections[0].device_keys(None, "all" if devices is None else devices)
    both = len({size_kind(model) for model in named}) > 1  # then each takes the size of its kind
    subjects = []
    for model in named:
        is_text = size_kind(model) == "tokens"
        if isinstance(model, str | Path):
            subject = subject_of(
                model,
                input_size=None if both and is_text else input_size,
                sequence_length=None if both and not is_text else sequence_length,
            )
        else:
            subject = subject_of(model, example_input=example_input)
        subjects.append(subject)
    by_execution = [_predictions(x, subjects, keys, labels=labels) for x in selections]
    return [answer for row in zip(*by_execution, strict=True) for answer in row]


def _predictions(
    selection: Selection, subjects: Sequence[Subject], keys: Sequence[str], *, labels: bool
) -> list[Prediction]:
    """Return the predictions for all devices of the first model, then those of the next."""
    question = selection.question
    questions = [(selection, subject, key) for subject in subjects for key in keys]

    def make() -> list[Prediction]:
        # Errors in the arguments are raised before torch is imported, which takes a second.
        from trappm.prediction.answer import answer_questions

        return answer_questions(questions)

    identities = [subject.identity for subject in subjects]
    if None in identities:
        predictions = make()
    else:
        identity = (question.identity, identities, keys, selection.device_is_default)
        predictions = _read_or_make(identity, question.snapshot, make)
        predictions = [
            replace(
                prediction,
                subject=subject,
                loop=question.loop_for(subject, prediction.settings)[0],
            )
            for prediction, (_, subject, _) in zip(predictions, questions, strict=True)
        ]
    if labels:
        from trappm.prediction.measured import with_label

        predictions = [with_label(prediction) for prediction in predictions]
    return predictions


MAX_ENTRIES = 1000
MAX_BYTES = 16 << 20
_CODE = Path(__file__).parents[1]
"""Package folder, which includes the shipped snapshot and extensions."""


def _read_or_make(
    identity: object, snapshot: str | Path | None, make: Callable[[], list[Prediction]]
) -> list[Prediction]:
    """Return the predictions of a question, made unless they are cached; a refusal is cached, too.

    Args:
        identity: The question, whose `repr` differs from that of any other.
        snapshot: Snapshot that the question names.
        make: Makes the predictions.

    Raises:
        TrappmError: As `make`.
    """
    folder = data_folder() / "answers"
    try:
        name = _entry_name(identity, snapshot)
    except OSError:  # something that they depend on is being moved, or cannot be read
        return make()
    path = folder / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if path.stat().st_size <= MAX_BYTES:
            rows = json.loads(path.read_bytes())
            if isinstance(rows, dict):
                raise _REFUSALS[rows["error"]](rows["message"])
            return [Prediction.from_dict(row) for row in rows]
    try:
        predictions = make()
    except tuple(_REFUSALS.values()) as error:
        kind = type(error).__name__
        if kind in _REFUSALS and not is_of_this_machine(error.__cause__ or error):
            _keep(path, identity, snapshot, {"error": kind, "message": str(error)})
        raise
    _keep(path, identity, snapshot, [prediction.to_dict() for prediction in predictions])
    return predictions


_REFUSALS = {kind.__name__: kind for kind in (InputError, UnsupportedModelError)}
"""Errors that lie in the question; their subclasses may pass, such as a timeout."""


def _keep(path: Path, identity: object, snapshot: str | Path | None, answer: object) -> None:
    """Write an answer into the cache, unless what it depends on has changed since."""
    with contextlib.suppress(OSError, TypeError, ValueError):
        if _entry_name(identity, snapshot) != path.stem:  # a snapshot was published since
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path, replace=True) as part:
            part.write_text(json.dumps(answer))
        entries = sorted(path.parent.glob("*.json"), key=lambda entry: entry.stat().st_mtime_ns)
        for entry in entries[:-MAX_ENTRIES]:
            entry.unlink(missing_ok=True)


def _entry_name(identity: object, snapshot: str | Path | None) -> str:
    places = [data_folder() / name for name in ("snapshots", PRICES, OWN_CARDS)]
    if snapshot is not None and (Path(snapshot) / MANIFEST).is_file():
        places.append(Path(snapshot))
    state = (
        _code(),
        library_versions(),
        uses_fused_attention(),
        [list(_files(place)) for place in places],
        identity,
    )
    return hashlib.sha256(repr(state).encode()).hexdigest()[:32]


@cache
def _code() -> list[tuple[str, int, int]]:
    others = [place for place in extension_folders() if not place.is_relative_to(_CODE)]
    return [row for place in (_CODE, *others) for row in _files(place)]


def _files(place: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and modification time of a file, or of each file below a folder."""
    if place.is_file():
        status = place.stat()
        yield str(place), status.st_size, status.st_mtime_ns
    for folder, folders, names in os.walk(place, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            status = os.stat(os.path.join(folder, name))
            yield os.path.join(folder, name), status.st_size, status.st_mtime_ns
