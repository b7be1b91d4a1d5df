"""`trappm.predict` and `trappm.compare`: what a step takes on a device, and on several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from trappm.prediction.kept_answers import kept_answers
from trappm.prediction.models.profile_cache import content_key
from trappm.prediction.models.sizes import check_size, size_kind, size_of
from trappm.prediction.prediction import Prediction
from trappm.prediction.question import Question
from trappm.prediction.simulated_step import ModelCall, example_inputs, loop_of
from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.models.known_names import content_of, is_file, refuse_unknown
from trappm.profiler.records import Precision, member

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from trappm.prediction.models.subjects import Subject
    from trappm.profiler.models.model_input import ExampleInputs
    from trappm.profiler.simulation.training_loop import TrainingLoop


def predict(
    model: str | Path | nn.Module,
    *,
    device: str | None = None,
    batch_size: int | None = None,
    input_size: int | None = None,
    sequence_length: int | None = None,
    phase: str = "train",
    precision: str | None = None,
    memory_format: str | None = None,
    optimizer: str | type | torch.optim.Optimizer | TrainingLoop | None = None,
    snapshot: str | Path | None = None,
    example_input: Any = None,
    targets: Any = None,
    loss: Callable[..., Tensor] | None = None,
    epochs: int | None = None,
    samples: int | None = None,
    carbon_g_per_kwh: float | None = None,
    power_limit_w: float | None = None,
    labels: bool = False,
) -> Prediction:
    """Predict time, memory, power and energy of a step, and what fits.

    >>> trappm.predict("resnet50", batch_size=64, device="a100").step_time_ms
    >>> trappm.predict(module, example_input=images, targets=classes, optimizer="adamw").fits

    Args:
        model: A timm name, a transformer such as `hf:gpt2`, the path of an ONNX file, or a module.
            The module stays as it is. If it is compiled, the answer is for eager mode.
        device: Device by any of its names (default: `DEFAULT_DEVICE`).
        batch_size: Samples per step (default: that of the example or the file, or 1).
        input_size: Pixels, for timm names and files (default: the model's own).
        sequence_length: Tokens, for transformers (default: the model's maximum, up to 2,048).
        phase: `train` or `infer`.
        precision: `fp32`, `amp-fp16`, `amp-bf16` or `bf16` (default: that of most labels).
        memory_format: `contiguous` or `channels-last` (default: that of most labels).
        optimizer: `sgd`, `momentum`, `adam` or `adamw`; a class or an object of `torch.optim`; or
            a `trappm.TrainingLoop`, which has accumulation, clipping and fused optimizers, too
            (default: that of most labels).
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
        labels: Look for labels of this step in the label store (`Prediction.measured`).

    Returns:
        The prediction. Modules with several inputs, targets or a loss have a memory only; the
        reason for each missing value is in `Prediction.missing`.

    Raises:
        UnknownArchitectureError: There is no such timm architecture.
        ModelFileError: The file is not an ONNX model that TraPPM can read.
        SnapshotError: There is no such snapshot, or it has no model of the device.
        InputError: A wrong setting, or a size or inputs that the model cannot have.
        UnsupportedModelError: The model cannot be traced; with the reason.
    """
    if isinstance(model, Mapping | list | tuple):
        raise InputError(
            f"the model is a {type(model).__name__}; predict() takes one model, and "
            "trappm.compare() a list of them"
        )
    [prediction] = _predictions(
        [model],
        device,
        None,
        _Options(
            batch_size=batch_size,
            phase=phase,
            precision=precision,
            memory_format=memory_format,
            snapshot=snapshot,
            epochs=epochs,
            samples=samples,
            carbon_g_per_kwh=carbon_g_per_kwh,
            power_limit_w=power_limit_w,
        ),
        _Inputs(example_input, targets, loss, input_size, sequence_length),
        optimizer,
        labels=labels,
    )
    return prediction


def compare(
    models: str | Path | nn.Module | Sequence[str | Path | nn.Module],
    devices: str | Sequence[str] | None = None,
    *,
    batch_size: int | None = None,
    input_size: int | None = None,
    sequence_length: int | None = None,
    phase: str = "train",
    precision: str | None = None,
    memory_format: str | None = None,
    optimizer: str | type | torch.optim.Optimizer | TrainingLoop | None = None,
    snapshot: str | Path | None = None,
    example_input: Any = None,
    epochs: int | None = None,
    samples: int | None = None,
    carbon_g_per_kwh: float | None = None,
    power_limit_w: float | None = None,
    labels: bool = False,
) -> list[Prediction]:
    """Predict a step of several models, or on several devices.

    Args:
        models: Models as `predict` takes them.
        devices: Devices by any of their names; None or "all" for all GPUs that a model was trained
            on for this phase.
        input_size: Pixels of the models that take images.
        sequence_length: Tokens of the models that take text.
        batch_size, phase, precision, memory_format, optimizer, snapshot: As for `predict`.
        example_input: Input of the modules among the models.
        epochs, samples, carbon_g_per_kwh, power_limit_w, labels: As for `predict`.

    Returns:
        All devices of the first model, then those of the next.

    Raises:
        TrappmError: As `predict`.
    """
    is_one = isinstance(models, str | Path) or hasattr(models, "forward")
    named: Any = [models] if is_one else models
    return _predictions(
        list(named),
        None,
        "all" if devices is None else devices,
        _Options(
            batch_size=batch_size,
            phase=phase,
            precision=precision,
            memory_format=memory_format,
            snapshot=snapshot,
            epochs=epochs,
            samples=samples,
            carbon_g_per_kwh=carbon_g_per_kwh,
            power_limit_w=power_limit_w,
        ),
        _Inputs(example_input, None, None, input_size, sequence_length),
        optimizer,
        labels=labels,
    )


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Arguments of a `Question`, except the optimizer."""

    batch_size: int | None
    phase: str
    precision: str | None
    memory_format: str | None
    snapshot: str | Path | None
    epochs: int | None
    samples: int | None
    carbon_g_per_kwh: float | None
    power_limit_w: float | None


@dataclass(frozen=True)
class _Inputs:
    """What models are called with."""

    example: Any
    targets: Any
    loss: Callable[..., Tensor] | None
    input_size: int | None
    sequence_length: int | None

    @property
    def is_special(self) -> bool:
        """Whether a module gets more than one tensor, or has a loss of its own."""
        has_tensor = self.example is None or hasattr(self.example, "shape")
        return self.loss is not None or self.targets is not None or not has_tensor

    def of(self, module: Any) -> ExampleInputs:
        """Return what a module is called with.

        Raises:
            InputError: It is no module, or does not take these inputs.
        """
        from torch import nn

        from trappm.profiler.models.on_meta import eager

        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            what = f"the class {module.__name__}" if isinstance(module, type) else f"a {kind}"
            raise InputError(f"the model is {what}; give a timm name, an ONNX file or a module")
        name = type(eager(module)).__name__
        if self.example is None or self.input_size is not None:
            raise InputError(
                f"{name} is a module; give an example of its input and no input size, such as "
                "example_input=torch.empty(8, 3, 224, 224)"
            )
        args, kwargs = (self.example,), {}
        if isinstance(self.example, Mapping):
            args, kwargs = (), dict(self.example)
        elif isinstance(self.example, tuple | list):
            args = tuple(self.example)
        return example_inputs(eager(module), args, kwargs, self.targets)

    def refuse(self) -> None:
        """Raise InputError if there is what names and files do not take."""
        given = [n for n in ("example", "targets", "loss") if getattr(self, n) is not None]
        if given:
            name = given[0].replace("example", "example_input")
            raise InputError(f"{name} is for modules; names and files know their input and loss")

    def sizes(self, models: Sequence[Any]) -> list[int | None]:
        """Return each model's size. With images and text, each gets the one for its kind."""
        if len({size_kind(model) for model in models}) > 1:
            return [
                self.sequence_length if size_kind(model) == "tokens" else self.input_size
                for model in models
            ]
        return [size_of(model, self.input_size, self.sequence_length) for model in models]


def _predictions(
    models: Sequence[Any],
    device: str | None,
    devices: str | Sequence[str] | None,
    options: _Options,
    inputs: _Inputs,
    optimizer: Any,
    *,
    labels: bool,
) -> list[Prediction]:
    """Return the predictions of each model on a device, or on several devices."""
    if not models:
        raise InputError("the list of models is empty")
    for model in models:
        if is_name(model):
            refuse_unknown(model)
    check_size("batch size", options.batch_size)
    check_size("input size", inputs.input_size)
    check_size("sequence length", inputs.sequence_length)
    loop = None
    if optimizer is not None:
        loop = loop_of(optimizer, member("precision", Precision, options.precision or "fp32"))
    question = Question(
        **vars(options),
        optimizer=None if loop is None else loop.optimizer.value,
        loop=None if isinstance(optimizer, str) else loop,
    )
    calls = [
        ModelCall(
            model=model,
            input_size=size,
            inputs=None if isinstance(model, str | Path) else inputs.of(model),
            loss=inputs.loss,
            loop=question.loop,
            phase=question.phase,
        )
        for model, size in zip(models, inputs.sizes(models), strict=True)
    ]
    if not all(isinstance(model, str | Path) for model in models):
        return _answers(question, calls, inputs, question.device_keys(device, devices))
    inputs.refuse()
    given = {**vars(options), "phase": question.phase.value, "loop": loop}
    predictions = kept_answers(
        {
            **{name: value for name, value in given.items() if value is not None},
            "models": models,
            "contents": [
                content_of(model) if is_name(model) else content_key(Path(model))
                for model in models
            ],
            "sizes": [call.input_size for call in calls],
            "device": device,
            "devices": devices,
        },
        lambda: _answers(question, calls, inputs, question.device_keys(device, devices)),
        write=Prediction.to_dict,
        read=Prediction.from_dict,
    )
    by_model = {str(call.model): call for call in calls}
    predictions = [replace(p, call=by_model.get(p.model)) for p in predictions]
    return [_with_label(p) for p in predictions] if labels else predictions


def _answers(
    question: Question, calls: Sequence[ModelCall], inputs: _Inputs, keys: Sequence[str]
) -> list[Prediction]:
    """Return the answers for all devices of the first model, then those of the next."""
    # Errors in the arguments are raised before torch is imported, which takes a second.
    from trappm.prediction.answering import answers, simulated_answer

    subjects: dict[int, Subject] = {}
    reasons: dict[int, str] = {}
    for place, call in enumerate(calls):
        try:
            subjects[place] = _subject(call, inputs)
        except UnsupportedModelError as error:
            if isinstance(call.model, str | Path):
                raise
            reasons[place] = str(error)
    asked = [(place, key) for place in subjects for key in keys]
    predicted = answers([(question, subjects[place], key) for place, key in asked])
    known = dict(zip(asked, predicted, strict=True))
    return [
        replace(known[place, key], call=call)
        if place in subjects
        else simulated_answer(question, call, key, reasons[place])
        for place, call in enumerate(calls)
        for key in keys
    ]


def _subject(call: ModelCall, inputs: _Inputs) -> Subject:
    """Return the model as trained heads take it.

    Raises:
        UnsupportedModelError: It is a module that only a simulation covers; with the reason.
    """
    from trappm.prediction.models.subjects import subject_of

    if isinstance(call.model, str | Path):
        return subject_of(call.model, input_size=call.input_size)
    if inputs.is_special:
        raise UnsupportedModelError(
            "only the memory of a module with several inputs, targets or a loss is predicted"
        )
    subject = subject_of(call.model, example_input=inputs.example, input_size=call.input_size)
    subject.profile()
    return subject


def _with_label(prediction: Prediction) -> Prediction:
    """Return a prediction of a named model with the best label of the same step."""
    from trappm.prediction.measured import measured_step
    from trappm.prediction.models.subjects import subject_of

    call = prediction.call
    if call is None:
        return prediction
    subject = subject_of(call.model, input_size=call.input_size)
    measured, remark = measured_step(prediction, subject)
    remarks = (*prediction.remarks, *([remark] if remark else []))
    return replace(prediction, measured=measured, remarks=remarks)


def is_name(model: object) -> TypeGuard[str]:
    """Return whether a model is the name of an architecture, not a file."""
    return isinstance(model, str) and not is_file(model)
