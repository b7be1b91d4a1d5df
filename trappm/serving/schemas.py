"""What may be asked over HTTP: the arguments of `trappm.predict`, checked before anything else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from trappm.prediction.costs import MAX_CARBON_G_PER_KWH, MAX_COUNT
from trappm.profiler.errors import InputError
from trappm.profiler.records import MAX_SIZE

MAX_NAME = 256
MAX_LIST = 64
"""Models, devices or questions in one request."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Size = Annotated[int, Field(ge=1, le=MAX_SIZE, strict=True)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]


class Settings(BaseModel):
    """How a step is run, on which devices, and what else to say; see `trappm.predict`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Name | None = Field(
        None, description="By any of its names; the snapshot's own if left out."
    )
    devices: (
        Literal["all"] | Annotated[list[Name], Field(min_length=1, max_length=MAX_LIST)] | None
    ) = Field(None, description="Several instead: the answer is a list.")
    batch_size: Size | None = None
    input_size: Size | None = Field(None, description="Pixels.")
    phase: Name = Field("train", description="train or infer")
    precision: Name | None = Field(None, description="fp32, amp-fp16 or amp-bf16")
    memory_format: Name | None = Field(None, description="contiguous or channels-last")
    optimizer: Name | None = Field(None, description="sgd, momentum or adam")
    snapshot: Name | None = Field(None, description="An id or alias of the server's registry.")
    epochs: Count | None = Field(None, description="With samples: what a whole run costs.")
    samples: Count | None = Field(None, description="Of one epoch.")
    carbon_g_per_kwh: (
        Annotated[float, Field(ge=0, le=MAX_CARBON_G_PER_KWH, allow_inf_nan=False)] | None
    ) = None

    @model_validator(mode="after")
    def _one_way_to_name_devices(self) -> Settings:
        if self.device is not None and self.devices is not None:
            raise ValueError("give device or devices, not both")
        return self

    def for_question(self) -> dict[str, Any]:
        """What a `trappm.prediction.answering.Question` takes of it."""
        apart = {"model", "device", "devices", "input_size", "snapshot"}
        return {name: getattr(self, name) for name in Settings.model_fields if name not in apart}


class Question(Settings):
    """One question: a model by its timm name, or several."""

    model: Name | Annotated[list[Name], Field(min_length=1, max_length=MAX_LIST)] = Field(
        description="A timm name, or a list of them: the answer is a list. Files are uploaded."
    )


Questions = Annotated[list[Question], Field(min_length=1, max_length=MAX_LIST)]

_ONE: TypeAdapter[Question] = TypeAdapter(Question)
_LIST: TypeAdapter[list[Question]] = TypeAdapter(Questions)
_FORM: TypeAdapter[Settings] = TypeAdapter(Settings)


def questions_in(body: bytes) -> Question | list[Question]:
    """The question, or the list of questions, in a JSON body.

    Raises:
        InputError: it is neither.
    """
    kind: TypeAdapter[Any] = _LIST if body.lstrip()[:1] == b"[" else _ONE
    try:
        found: Question | list[Question] = kind.validate_json(body)
        return found
    except ValidationError as error:
        raise InputError(f"the body is no question: {_first(error)}; see /openapi.json") from None


def settings_in(text: str | None) -> Settings:
    """The form field `question` beside an uploaded file, which may be left out.

    Raises:
        InputError: it is none.
    """
    try:
        return _FORM.validate_json(text or "{}")
    except ValidationError as error:
        raise InputError(
            f"the form's question is none: {_first(error)}; see /openapi.json"
        ) from None


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, where, and with which value."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(
        str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()
    )
    value = repr(first.get("input"))
    told = f" ({value[:60]})" if first["type"] not in {"missing", "json_invalid"} else ""
    return f"{where}: {first['msg']}{told}" if where else f"{first['msg']}{told}"


def openapi_body() -> dict[str, Any]:
    """The request body of both endpoints, for OpenAPI."""
    form = {
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"type": "string", "format": "binary", "description": "An ONNX file."},
            "question": {"type": "string", "description": "Settings, as JSON."},
        },
    }
    question = {"$ref": "#/components/schemas/Question"}
    several = {"type": "array", "items": question, "minItems": 1, "maxItems": MAX_LIST}
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"anyOf": [question, several]}},
                "multipart/form-data": {"schema": form},
            },
        }
    }
