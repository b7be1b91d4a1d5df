"""`trappm.predict`: what a step of a model costs on a device, and what follows from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard, Unpack, overload

from trappm.call_arguments import checked_call, unknown_argument
from trappm.prediction.estimate import loop_of
from trappm.prediction.kept_answers import kept_answers
from trappm.prediction.models.profile_cache import content_key
from trappm.prediction.models.sizes import check_size, size_kind, size_of
from trappm.prediction.prediction import Prediction
from trappm.prediction.question import Question
from trappm.profiler.errors import InputError
from trappm.profiler.models.known_names import content_of, is_file, refuse_unknown
from trappm.profiler.records import Phase, Precision

if TYPE_CHECKING:
    import torch
    from torch import nn

Model = "str | Path | nn.Module"


class Options(TypedDict, total=False):
    """Arguments beside model and device; see `predict`."""

    example_input: torch.Tensor | None
    batch_size: int | None
    input_size: int | None
    sequence_length: int | None
    phase: str
    precision: str | None
    memory_format: str | None
    optimizer: str | None
    snapshot: str | Path | None
    epochs: int | None
    samples: int | None
    carbon_g_per_kwh: float | None
    power_limit_w: float | None


_ARGUMENTS = frozenset({*Options.__annotations__, "model", "device", "devices"})


@overload
def predict(
    model: str | Path | nn.Module,
    config: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    **options: Unpack[Options],
) -> Prediction: ...
@overload
def predict(
    model: Mapping[str, Any], *, device: str | None = None, **options: Unpack[Options]
) -> Prediction: ...
@overload
def predict(
    model: list[Any] | tuple[Any, ...],
    config: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    devices: Literal["all"] | Sequence[str] | None = None,
    **options: Unpack[Options],
) -> list[Prediction]: ...
@overload
def predict(
    model: str | Path | nn.Module | Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    *,
    devices: Literal["all"] | Sequence[str],
    **options: Unpack[Options],
) -> list[Prediction]: ...
@checked_call
def predict(
    model: Any,
    config: Any = None,
    *others: Any,
    device: str | None = None,
    devices: Literal["all"] | Sequence[str] | None = None,
    **options: Any,
) -> Prediction | list[Prediction]:
    """Predicts the cost of a step of a timm architecture, a transformer, an ONNX file or a module.

    `predict({"model": "resnet101_32.onnx", "device": "GPU:A100-SXM4-40GB:1"})` and
    `predict("resnet101_32.onnx", {"device": ...})` say the same as keywords do.

    Args:
        model: a timm name, a transformer such as `hf:gpt2`, the path of an ONNX file, a module
            whose forward takes one tensor (it stays as it is), or a list of these.
        config: further arguments by name; or the example input of a module.
        others: none; a module of several inputs, or with targets, is for `trappm.estimate`.
        device: by any of its names; `DEFAULT_DEVICE` by default.
        devices: several instead, or "all" GPUs that a model was trained on for this phase.
        **options: of the step and the answer:

            - `example_input`: for modules (those of a list, too), a tensor as `forward` takes it,
              batch first; only its shape and type are read.
            - `batch_size`: samples a step; by default the example's or the file's own, or 1.
            - `input_size`: pixels, for timm names and files; by default the model's own.
            - `sequence_length`: tokens, for transformers; by default the most that the model
              takes, up to 2,048.
            - `phase`: `train` (by default) or `infer`.
            - `precision`, `memory_format`, `optimizer`: by default as most labels of the device
              had them. An optimizer is a name, or a class or an object of `torch.optim`.
            - `snapshot`: an id, an alias, or a folder; by default the latest one here, for
              devices that it does not know those before it, and the one that ships with trappm
              at last.
            - `epochs`, `samples`: adds what a whole run costs (`Prediction.run`).
            - `carbon_g_per_kwh`: of the electricity, for its CO2.
            - `power_limit_w`: of the card; by default the limit as delivered.

    Returns:
        One prediction, or a list for a list of models or for `devices`: all devices of the first
        model, then those of the next.

    Raises:
        UnknownArchitectureError: no such timm architecture.
        ModelFileError: the file is not an ONNX model that we can read.
        SnapshotError: no such snapshot, or it has no head for the device.
        InputError: a batch or input size that the model cannot have, an example that does not fit
            the module, or an argument that there is not.
        UnsupportedModelError: no graph can be made of the model; with the reason.
    """
    given = {"device": device, "devices": devices, **options}
    if config is not None and not isinstance(config, Mapping):
        given["example_input"], config = _example(model, config, others), None
    arguments = _arguments(model, config, given)
    model = arguments.pop("model")
    device, devices = arguments.pop("device", None), arguments.pop("devices", None)
    example = arguments.pop("example_input", None)
    pixels, tokens = arguments.pop("input_size", None), arguments.pop("sequence_length", None)
    many = isinstance(model, list | tuple) and not hasattr(model, "forward")
    models = list(model) if many else [model]
    if not models:
        raise InputError("the list of models is empty")
    for named in models:
        if is_name(named):
            refuse_unknown(named)
    sizes = _sizes(models, pixels, tokens)
    question = Question(**arguments)
    is_named = [isinstance(model, str | Path) for model in models]

    def ask() -> list[Prediction]:
        return _answers(question, models, is_named, example, sizes, device, devices)

    if all(is_named) and example is None:
        contents = [
            content_of(model) if is_name(model) else content_key(Path(model)) for model in models
        ]
        of_models = {"models": models, "contents": contents, "sizes": sizes}
        predictions = kept_answers(
            {
                "phase": Phase.TRAIN.value,
                **arguments,
                **of_models,
                "device": device,
                "devices": devices,
            },
            ask,
            write=Prediction.to_dict,
            read=Prediction.from_dict,
        )
    else:
        predictions = ask()
    return predictions if many or devices is not None else predictions[0]


def _answers(
    question: Question,
    models: Sequence[Any],
    is_named: Sequence[bool],
    example: Any,
    sizes: Sequence[int | None],
    device: str | None,
    devices: Any,
) -> list[Prediction]:
    """All devices of the first model, then those of the next."""
    if all(is_named) and example is None:
        question.device_keys(device, devices)
    # What was wrong with the question was told before torch is imported, which takes a second.
    from trappm.prediction.answering import answers
    from trappm.prediction.models.subjects import subject_of

    is_mixed = len(set(is_named)) > 1  # then each model gets the argument for its kind alone
    subjects = [
        subject_of(
            model,
            example_input=None if is_mixed and named else example,
            input_size=None if is_mixed and not named else size,
        )
        for model, named, size in zip(models, is_named, sizes, strict=True)
    ]
    keys = question.device_keys(device, devices)
    return answers([(question, subject, key) for subject in subjects for key in keys])


def _example(model: Any, value: Any, others: Sequence[Any]) -> Any:
    """Return the example input of a module where one is given without its name.

    Raises:
        InputError: there is more than one, or the model is no module.
    """
    if not hasattr(model, "forward"):
        raise InputError(
            f"the second argument of predict() is a {type(value).__name__}; give options by name, "
            "such as device='a100'"
        )
    if others or not hasattr(value, "shape"):
        raise InputError(
            "predict() takes a module and one tensor; for several inputs, targets or a loss call "
            "trappm.estimate(module, *inputs, targets=labels), which gives the memory"
        )
    return value


def _sizes(
    models: Sequence[Any], input_size: int | None, sequence_length: int | None
) -> list[int | None]:
    """Of each model's input; where there are images and text, each gets the one for its kind."""
    if len({size_kind(model) for model in models}) > 1:
        return [sequence_length if size_kind(model) == "tokens" else input_size for model in models]
    return [size_of(model, input_size, sequence_length) for model in models]


def is_name(model: object) -> TypeGuard[str]:
    """Whether it names an architecture, and no file."""
    return isinstance(model, str) and not is_file(model)


def _arguments(
    model: Any, config: Mapping[str, Any] | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name; a keyword that is given outweighs the configuration.

    Raises:
        InputError: no model, an argument that there is not, or an impossible size.
    """
    arguments = dict(config or {})
    if isinstance(model, Mapping):
        arguments = {**model, **arguments}
        if "model" not in arguments:
            raise InputError("the dictionary names no model; add 'model': a timm name or a file")
    elif "model" in arguments:
        raise InputError("the model is given twice; leave 'model' out of the dictionary")
    else:
        arguments["model"] = model
    arguments.update({name: value for name, value in given.items() if value is not None})
    unknown = sorted(set(arguments) - _ARGUMENTS)
    if unknown:
        if unknown[0] in {"loss", "targets"}:
            raise InputError(
                f"predict() has no argument {unknown[0]!r}, but trappm.estimate() has; it gives "
                "the memory"
            )
        raise unknown_argument(predict, unknown[0], known=Options.__annotations__)
    if arguments.get("optimizer") is not None:
        arguments["optimizer"] = loop_of(arguments["optimizer"], Precision.FP32).optimizer.value
    for name in ("batch_size", "input_size", "sequence_length"):
        check_size(name.replace("_", " "), arguments.get(name))
    return arguments
