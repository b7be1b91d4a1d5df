"""Requests of servers, with their limits: the arguments of `trappm.predict` as schemas.

HTTP and the Model Context Protocol share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trappm.learner.snapshots.manifest import NAME
from trappm.prediction.cost import MAX_USD_PER_HOUR
from trappm.prediction.question import (
    MAX_CARBON_G_PER_KWH,
    MAX_COUNT,
    MAX_LIMIT_W,
    QuestionSettings,
)
from trappm.profiler.errors import InputError, SnapshotError, fault_text, nearest
from trappm.profiler.models.known_names import looks_like_path
from trappm.profiler.models.own_modules import is_own_module
from trappm.profiler.records import MAX_SIZE, OPTIMIZER_NAMES, PRECISION_NAMES

MAX_NAME = 256
MAX_LIST = 64
"""Models, devices or questions in one request."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Size = Annotated[int, Field(ge=1, le=MAX_SIZE, strict=True)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]


class StepRequest(BaseModel):
    """Settings of a step; see `trappm.predict`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: Size | None = Field(None, description="Samples per GPU.")
    input_size: Size | None = Field(None, description="Pixels, or tokens for hf: models.")
    precision: Name | None = Field(None, description=PRECISION_NAMES)
    memory_format: Name | None = Field(None, description="contiguous or channels-last")
    optimizer: Name | None = Field(None, description=OPTIMIZER_NAMES)
    snapshot: Name | None = Field(None, description="An id or alias of the server's registry.")

    def for_question(self) -> dict[str, Any]:
        """Return the arguments of a `trappm.prediction.question.Question`, but the snapshot."""
        names = {"execution", *QuestionSettings.__annotations__} - {"snapshot"}
        return self.model_dump(include=names)


class RunRequest(StepRequest):
    """Settings of a step on one device, and of a whole run; see `trappm.predict`."""

    device: Name | None = Field(
        None, description="Device by any of its names (default: a100-40gb)."
    )
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


class DeviceRequest(RunRequest):
    """Settings of a step in any phase, and of its report."""

    phase: Name = Field("train", description="train or infer")
    execution: Name = Field("eager", description="eager or compile")
    breakdown_depth: Annotated[int, Field(ge=1, le=20, strict=True)] | None = Field(
        None, description="Module levels of the memory breakdown (default: no breakdown)."
    )


class PredictionSettings(DeviceRequest):
    """Settings of a step on one or several devices."""

    devices: (
        Literal["all"] | Annotated[list[Name], Field(min_length=1, max_length=MAX_LIST)] | None
    ) = Field(None, description="Several devices instead of one; the response is a list.")

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


def request_fault(fault: Mapping[str, Any], known: Iterable[str], see: str) -> InputError:
    """Return the error of one line for a fault that pydantic found in a request.

    Args:
        fault: One of the faults of a `ValidationError`.
        known: Names of all fields.
        see: Where the schema is; the end of the message.
    """
    where = ".".join(str(x) for x in fault["loc"] if isinstance(x, int) or x.isidentifier())
    if fault["type"] == "extra_forbidden":
        hint = nearest(str(fault["loc"][-1]), known, otherwise=see)
        return InputError(f"{where}: unknown field; {hint}")
    if not where:  # of the request as a whole
        return InputError(f"{fault_text(fault)}; {see}")
    value = repr(fault.get("input"))[:60]
    shown = "" if fault["type"] in {"missing", "json_invalid"} else f" ({value})"
    return InputError(f"{where}: {fault_text(fault)}{shown}; {see}")


def refuse_outside(model: str, instead: str) -> None:
    """Raise InputError if a name of a model is of code or may be a path: servers open neither.

    Args:
        model: The name.
        instead: Remedy, the end of the message.
    """
    if is_own_module(model):
        raise InputError(
            f"{model!r} names a module to import, which this server never does; {instead}"
        )
    if looks_like_path(model):
        raise InputError(
            f"{model!r} is not a timm name, and this server reads no files by path; {instead}"
        )


def refuse_folder(snapshot: str, instead: str) -> None:
    """Raise SnapshotError if the name of a snapshot is not an id or alias of a registry."""
    if not NAME.fullmatch(snapshot):
        raise SnapshotError(f"{snapshot!r} is not an id or alias; {instead}")
