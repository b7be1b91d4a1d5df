"""Schemas of HTTP requests, which correspond to the arguments of `trappm.predict`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from trappm.prediction.cost import MAX_USD_PER_HOUR
from trappm.prediction.question import (
    MAX_CARBON_G_PER_KWH,
    MAX_COUNT,
    MAX_LIMIT_W,
    QuestionSettings,
)
from trappm.prediction.selection import DEFAULT_DEVICE
from trappm.profiler.records import MAX_SIZE, PRECISION_NAMES

MAX_NAME = 256
MAX_LIST = 64
"""Models, devices or questions in one request."""
MAX_GPUS = 65_536
MAX_OVERLAID = 4
"""Largest number of devices in one roofline plot."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Size = Annotated[int, Field(ge=1, le=MAX_SIZE, strict=True)]
GpuCount = Annotated[int, Field(ge=1, le=MAX_GPUS, strict=True)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]


class StepRequest(BaseModel):
    """Settings of a step; see `trappm.predict`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: Size | None = Field(None, description="Samples per GPU.")
    input_size: Size | None = Field(None, description="Pixels, or tokens for hf: models.")
    precision: Name | None = Field(None, description=PRECISION_NAMES)
    memory_format: Name | None = Field(None, description="contiguous or channels-last")
    optimizer: Name | None = Field(None, description="sgd, momentum, adam or adamw")
    snapshot: Name | None = Field(None, description="An id or alias of the server's registry.")

    def for_question(self) -> dict[str, Any]:
        """Return the arguments of a `trappm.prediction.question.Question`, but the snapshot."""
        names = {"execution", *QuestionSettings.__annotations__} - {"snapshot"}
        return self.model_dump(include=names)


class PredictionSettings(StepRequest):
    """Settings of a step, its devices and its report; see `trappm.predict`."""

    device: Name | None = Field(
        None, description="Device by any of its names (default: a100-40gb)."
    )
    devices: (
        Literal["all"] | Annotated[list[Name], Field(min_length=1, max_length=MAX_LIST)] | None
    ) = Field(None, description="Several devices instead of one; the response is a list.")
    phase: Name = Field("train", description="train or infer")
    execution: Name = Field("eager", description="eager or compile")
    epochs: Count | None = Field(
        None, description="Number of epochs of a whole run, excluding data loading; needs samples."
    )
    samples: Count | None = Field(None, description="Number of training samples per epoch.")
    carbon_g_per_kwh: (
        Annotated[float, Field(ge=0, le=MAX_CARBON_G_PER_KWH, allow_inf_nan=False)] | None
    ) = None
    accumulation: Size | None = Field(
        None, description="Passes per optimizer step, each of batch_size samples (default: 1)."
    )
    power_limit_w: Annotated[float, Field(gt=0, le=MAX_LIMIT_W, allow_inf_nan=False)] | None = (
        Field(None, description="GPU power limit in watts (default: factory setting).")
    )
    usd_per_hour: Annotated[float, Field(gt=0, le=MAX_USD_PER_HOUR, allow_inf_nan=False)] | None = (
        Field(None, description="USD per hour of the device (default: known prices of clouds).")
    )
    breakdown_depth: Annotated[int, Field(ge=1, le=20, strict=True)] | None = Field(
        None, description="Module levels of the memory breakdown (default: no breakdown)."
    )

    @model_validator(mode="after")
    def _one_way_to_name_devices(self) -> PredictionSettings:
        if self.device is not None and self.devices is not None:
            raise ValueError("give device or devices, not both")
        return self


class PredictionRequest(PredictionSettings):
    """One question about one or several models by timm name."""

    model: Name | Annotated[list[Name], Field(min_length=1, max_length=MAX_LIST)] = Field(
        description="A timm name, or a list of names (the response is a list). Upload files."
    )


class RooflineRequest(StepRequest):
    """A step and the devices whose rooflines to show it under; see `trappm roofline`."""

    model: Name = Field(description="A timm name.")
    devices: tuple[Name, ...] = Field(
        (DEFAULT_DEVICE,),
        min_length=1,
        max_length=MAX_OVERLAID,
        description="GPUs, such as v100.",
    )
    phase: Name = Field("train", description="train or infer")


class ScalingRequest(StepRequest):
    """One training step on several GPUs; see `trappm scale`."""

    model: Name = Field(description="A timm name, or a transformer such as hf:gpt2.")
    devices: tuple[Name, ...] = Field(
        (DEFAULT_DEVICE,), min_length=1, max_length=16, description="GPUs, such as v100."
    )
    gpus: tuple[GpuCount, ...] = Field(
        (1, 2, 4, 8), min_length=1, max_length=8, description="Total numbers of GPUs."
    )
    accumulation: Size = Field(1, description="Passes per optimizer step.")
    strategies: tuple[Name, ...] = Field(
        (), max_length=3, description="ddp, fsdp and tp (default: all)."
    )


FIELDS = {
    name
    for model in (PredictionRequest, RooflineRequest, ScalingRequest)
    for name in model.model_fields
}  # fmt: skip
"""Names of the fields of all requests."""

PredictionRequests = Annotated[
    Annotated[PredictionRequest, Tag("question")]
    | Annotated[
        list[PredictionRequest], Field(min_length=1, max_length=MAX_LIST), Tag("questions")
    ],
    Discriminator(lambda body: "questions" if isinstance(body, list) else "question"),
]
"""The body of a request: one question, or a list of them."""
