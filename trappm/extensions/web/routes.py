"""Routes of the server: health, predictions, snapshots."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, File, Form, Request, Response, UploadFile
from pydantic import Json

from trappm.extensions.web.answerer import Answer, Answerer, named_model
from trappm.extensions.web.schemas import PredictionRequests, RooflineRequest, ScalingRequest
from trappm.extensions.web.uploads import RequestedModel, Upload
from trappm.prediction.comparison import comparable, verdicts
from trappm.prediction.requests import MAX_LIST, PredictionSettings
from trappm.prediction.selection import DEFAULT_DEVICE, catalogue_keys
from trappm.profiler.errors import InputError

router = APIRouter()

# All dependencies are coroutines, because FastAPI would run functions in threads.

_DEFAULTS = PredictionSettings.model_validate({})


@dataclass(frozen=True)
class RequestedSteps:
    """Questions of one request, each with its models."""

    questions: list[tuple[PredictionSettings, list[RequestedModel]]]
    is_list: bool
    """True if the request and the response are lists."""


async def _answerer(request: Request) -> Answerer:
    answerer: Answerer = request.app.state.answerer
    return answerer


async def _read_json(questions: Annotated[PredictionRequests, Body()]) -> RequestedSteps:
    """Return the questions; raises InputError for too many models or a path as a name."""
    rows = []
    for question in questions if isinstance(questions, list) else [questions]:
        names = question.model if isinstance(question.model, list) else [question.model]
        rows.append((question, [named_model(name, question.input_size) for name in names]))
    if sum(len(models) for _, models in rows) > MAX_LIST:
        raise InputError(f"more than {MAX_LIST} models in one request; send several requests")
    return RequestedSteps(list(rows), isinstance(questions, list))


async def _read_upload(
    request: Request,
    file: Annotated[UploadFile, File(description="An ONNX file.")],
    question: Annotated[
        Json[PredictionSettings], Form(description="Settings, as JSON.")
    ] = _DEFAULTS,
) -> RequestedSteps:
    """Return the upload's question; raises ServingError or ModelFileError (too large, empty)."""
    max_bytes = request.app.state.settings.max_upload_bytes
    upload = await asyncio.to_thread(Upload, file.file, max_bytes)
    return RequestedSteps([(question, [upload.model(file.filename, question.input_size)])], False)


Service = Annotated[Answerer, Depends(_answerer)]
JsonSteps = Annotated[RequestedSteps, Depends(_read_json)]
UploadSteps = Annotated[RequestedSteps, Depends(_read_upload)]


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Report that the process is alive."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(answerer: Service) -> dict[str, Any]:
    """Report that the server is ready, with its active snapshots."""
    return {"status": "ready", "snapshots": answerer.snapshots.ids}


@router.get("/metrics", response_class=Response)
async def metrics(answerer: Service) -> Response:
    """Return the Prometheus metrics."""
    text = answerer.metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/v1/predict")
async def predict(requested: JsonSteps, answerer: Service) -> Response:
    """Predict steps as `trappm predict --json`; the response to a list is a list."""
    return await _predictions(requested, answerer)


@router.post("/v1/predict/upload", form_limits={"max_files": 1, "max_fields": 4})
async def predict_upload(requested: UploadSteps, answerer: Service) -> Response:
    """Predict a step of an uploaded ONNX file."""
    return await _predictions(requested, answerer)


@router.post("/v1/compare")
async def compare(requested: JsonSteps, answerer: Service) -> Response:
    """Compare devices (default: all GPUs), as `trappm compare --json`."""
    return await _comparisons(requested, answerer)


@router.post("/v1/compare/upload", form_limits={"max_files": 1, "max_fields": 4})
async def compare_upload(requested: UploadSteps, answerer: Service) -> Response:
    """Compare devices (default: all GPUs) for an uploaded ONNX file."""
    return await _comparisons(requested, answerer)


@router.post("/v1/roofline")
async def roofline(question: RooflineRequest, answerer: Service) -> Response:
    """Return rooflines and the bounds of a step, as `trappm roofline --json`."""
    model = named_model(question.model, question.input_size)
    return _json(await answerer.rooflines(question, model))


@router.post("/v1/scale")
async def scale(question: ScalingRequest, answerer: Service) -> Response:
    """Predict a training step on several GPUs, as `trappm scale --json`."""
    model = named_model(question.model, question.input_size)
    return _json(await answerer.scalings(question, model))


@router.get("/v1/snapshot")
async def snapshot(answerer: Service, name: str | None = None) -> Response:
    """Return the manifest of the active snapshot, or of another one by id or alias."""
    snapshots = await answerer.snapshots.named(name)
    return _json(_dump(snapshots[0].manifest.to_json()))


@router.get("/v1/devices")
async def devices(answerer: Service) -> dict[str, Any]:
    """Return the devices with heads (metrics by phase, snapshot) and all catalogue cards."""
    rows: dict[str, Any] = {}
    for snapshot in reversed(answerer.snapshots.current):
        for device, phases in snapshot.heads.items():
            metrics = {str(phase): list(x.heads.metrics) for phase, x in phases.items()}
            rows[device] = {"snapshot": snapshot.id, "metrics": metrics}
    manifests = [snapshot.manifest for snapshot in answerer.snapshots.current]
    return {"devices": rows, "catalogue": catalogue_keys(manifests), "default": DEFAULT_DEVICE}


@router.post("/v1/reload")
async def reload(answerer: Service) -> dict[str, Any]:
    """Reload the snapshot now; requests in flight are not affected."""
    changed = await answerer.snapshots.reload()
    return {"changed": changed, "snapshots": answerer.snapshots.ids}


async def _predictions(requested: RequestedSteps, answerer: Answerer) -> Response:
    replies = []
    for question, models in requested.questions:
        answers = await answerer.predict(question, models)
        several = question.devices is not None or isinstance(getattr(question, "model", ""), list)
        replies.append(_list(answers) if several else answers[0].json)
    return _reply(requested, replies)


async def _comparisons(requested: RequestedSteps, answerer: Answerer) -> Response:
    replies = []
    for question, models in requested.questions:
        everywhere = question.device is None and question.devices in (None, "all")
        wanted = question.model_copy(update={"devices": "all"}) if everywhere else question
        answers = await answerer.predict(wanted, models)
        kept, left_out = comparable([x.prediction for x in answers], near_labels=everywhere)
        answers = [answer for answer in answers if answer.prediction in kept]
        if everywhere:
            left_out += await answerer.unable_devices(question)
        best = _dump(verdicts([answer.prediction for answer in answers]))
        replies.append(
            b'{"predictions": %b, "best": %b, "left_out": %b}'
            % (_list(answers), best, _dump(left_out))
        )
    return _reply(requested, replies)


def _reply(requested: RequestedSteps, replies: list[bytes]) -> Response:
    return _json(b"[%b]" % b", ".join(replies) if requested.is_list else replies[0])


def _list(answers: list[Answer]) -> bytes:
    return b"[%b]" % b", ".join(answer.json for answer in answers)


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()
