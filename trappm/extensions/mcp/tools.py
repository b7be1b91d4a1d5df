"""Tools: each has a request with the limits of HTTP, and a result with the JSON of a command.

The schema of a result is that of its record, so its fields are those of `--json`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from trappm import LabelStore, predict
from trappm.label_store import MAX_PAGE, records, with_iso_times
from trappm.prediction.comparison import compare_able, comparison_json
from trappm.prediction.models import size_kind
from trappm.prediction.prediction import DERIVED, Prediction
from trappm.prediction.requests import (
    DeviceRequest,
    Name,
    PredictionRequest,
    RunRequest,
    StepRequest,
    refuse_folder,
    refuse_outside,
)
from trappm.store import LabelFilter
from trappm.store.label_filter import MAX_WHERE

_MODEL = "A timm architecture, or a transformer such as hf:gpt2."
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function for assistants, with the schemas of its request and its result."""

    name: str
    does: str
    request: type[BaseModel]
    result: type[BaseModel]
    run: Callable[[Any], dict[str, Any]]
    """Returns the JSON values of the result; raises TrappmError."""


class OneStep(DeviceRequest):
    """A step of one model on one device."""

    model: Name = Field(description=_MODEL)


class AdviceRequest(RunRequest):
    """A training step that should fit, or whose run should end in time."""

    model: Name = Field(description=_MODEL)
    max_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Largest duration of the run; needs epochs and samples."
    )


def _predict(request: OneStep) -> dict[str, Any]:
    step = predict(request.model, device=request.device, **_settings(request, [request.model]))
    return step.to_dict(breakdown_depth=request.breakdown_depth)


def _compare(request: PredictionRequest) -> dict[str, Any]:
    models = request.model if isinstance(request.model, list) else [request.model]
    devices = [request.device] if request.device is not None else request.devices
    settings = _settings(request, models)
    predictions, left_out = compare_able(
        models,
        None if devices == "all" else devices,
        executions=(settings.pop("execution"),),
        **settings,
    )
    return comparison_json(predictions, left_out, request.breakdown_depth)


def _advise(request: AdviceRequest) -> dict[str, Any]:
    from trappm.extensions.advice.advising import advise

    return advise(
        request.model,
        device=request.device,
        max_hours=request.max_hours,
        **_settings(request, [request.model]),
    ).to_dict()


def _labels(request: Any) -> dict[str, Any]:
    wanted = request.model_dump(exclude={"limit"})
    frame = LabelStore().labels(**wanted, limit=request.limit + 1)
    rows = list(records(with_iso_times(frame.head(request.limit))))
    return {"rows": rows, "has_more": len(frame) > request.limit}


def _settings(request: StepRequest, models: Collection[str]) -> dict[str, Any]:
    """Return the settings as arguments of `trappm.predict`; refuses names of files and code."""
    for model in models:
        refuse_outside(model, "run trappm predict instead")
    if request.snapshot is not None:
        refuse_folder(request.snapshot, "list them with: trappm snapshot list")
    sizes = {"px": "input_size", "tokens": "sequence_length"}
    kinds = {size_kind(model) for model in models}
    return {
        **{sizes[kind]: request.input_size for kind in kinds},
        **request.for_question(),
        "snapshot": request.snapshot,
    }


def _schema(
    record: type,
    properties: Collection[str],
    *,
    without: Collection[str] = (),
    names: Mapping[str, Any] | None = None,
    optional: Mapping[str, Any] | None = None,
    has_sentence: bool = True,
) -> type[BaseModel]:
    """Return the schema of a record's `to_dict`: its fields and properties, and its sentence.

    Args:
        record: A dataclass.
        properties: Properties that `to_dict` adds.
        without: Fields that it leaves out.
        names: Types by name, for annotations that are not imported when the program runs.
        optional: Types of what it adds on request.
        has_sentence: Whether it adds the record as a text.
    """
    hints = get_type_hints(record, localns=dict(names or {}))
    types = {f.name: hints[f.name] for f in fields(record) if f.name not in without}
    types |= {name: get_type_hints(getattr(record, name).fget)["return"] for name in properties}
    known: dict[str, Any] = {"sentence": (str, ...)} if has_sentence else {}
    known |= {name: (kind, ...) for name, kind in types.items()}
    known |= {name: (kind | None, None) for name, kind in (optional or {}).items()}
    return create_model(record.__name__, __config__=_STRICT, **known)


_PREDICTION = _schema(
    Prediction,
    DERIVED[1:],
    without=("subject", "loop"),
    names={"Subject": Any, "TrainingLoop": Any},
    optional={"memory_breakdown": dict[str, Any]},
)


class ComparisonResult(BaseModel):
    """Predictions that can be compared, the best of them, and what is left out."""

    model_config = _STRICT

    predictions: list[_PREDICTION]  # type: ignore[valid-type]
    best: dict[str, dict[str, str | None]]
    best_of_all: dict[str, dict[str, str]]
    left_out: list[dict[str, str]]


class LabelRows(BaseModel):
    """Labels, or attempts if the request names an outcome; a row has a value per column."""

    model_config = _STRICT

    rows: list[dict[str, str | int | float | None]]
    has_more: bool


def _advice_schema() -> type[BaseModel]:
    from trappm.extensions.advice.advising import Advice, AdvisedStep

    step = _schema(AdvisedStep, ("verdict",), has_sentence=False)
    return _schema(
        Advice,
        ("is_needed",),
        without=("has_batch_norm",),
        names={"Prediction": _PREDICTION, "AdvisedStep": step},
    )


def _label_request() -> type[BaseModel]:
    """Return the schema of a filter of labels, its columns, order and number of rows."""
    known: dict[str, Any] = {}
    for name, hint in get_type_hints(LabelFilter, include_extras=True).items():
        kind, text = get_args(hint)
        if kind == str | None:
            kind = Annotated[str, Field(max_length=MAX_WHERE)] | None
        known[name] = (kind, Field(None, description=text))
    for name, default, text in (
        ("columns", None, "Columns, separated by commas (default: all)."),
        ("sort", "architecture", "Column to sort by; with a leading '-' in descending order."),
    ):
        kind = Annotated[str, Field(max_length=MAX_WHERE)]
        known[name] = (kind if default else kind | None, Field(default, description=text))
    known["limit"] = (Annotated[int, Field(ge=1, le=MAX_PAGE)], Field(50, description="Rows."))
    return create_model("LabelRequest", __config__=_STRICT, **known)


def tools() -> list[Tool]:
    """Return the tools; `advise` needs the extension advice."""
    known = [
        Tool(
            name="predict",
            does="Predict the time, GPU memory, power, energy and price of one training or "
            "inference step of a PyTorch model on one GPU, with 90 % intervals, whether it fits, "
            "and the largest batch. No GPU is needed.",
            request=OneStep,
            result=_PREDICTION,
            run=_predict,
        ),
        Tool(
            name="compare",
            does="Compare GPUs (default: all) or models for a step: the fastest, the cheapest, "
            "and what fits.",
            request=PredictionRequest,
            result=ComparisonResult,
            run=_compare,
        ),
        Tool(
            name="labels",
            does="Query the labels that were measured or imported on this machine.",
            request=_label_request(),
            result=LabelRows,
            run=_labels,
        ),
    ]
    if find_spec("trappm.extensions.advice") is not None:
        advice = Tool(
            name="advise",
            does="Find the cheapest changes with which a training step fits a GPU, or a run ends "
            "in time, with lines of Python for each.",
            request=AdviceRequest,
            result=_advice_schema(),
            run=_advise,
        )
        known.insert(2, advice)
    return known
