"""Schemas of HTTP requests beyond those of one step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from trappm.prediction.requests import MAX_LIST, Name, PredictionRequest, Size, StepRequest
from trappm.prediction.selection import DEFAULT_DEVICE

MAX_GPUS = 65_536
MAX_OVERLAID = 4
"""Largest number of devices in one roofline plot."""

GpuCount = Annotated[int, Field(ge=1, le=MAX_GPUS, strict=True)]


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
