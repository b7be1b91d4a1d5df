"""The web application: routes to predictions, one object for a single process and for Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic.json_schema import models_json_schema
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from trappm import __version__
from trappm.page.mounting import mount
from trappm.prediction.comparison import verdicts
from trappm.profiler.errors import InputError, TrappmError
from trappm.serving.answers.answerer import Answer, Answerer, named_model
from trappm.serving.answers.tracing import Model
from trappm.serving.answers.uploads import Upload
from trappm.serving.gate import Gate, client_of
from trappm.serving.metrics import Metrics
from trappm.serving.problems import MEDIA_TYPE, body, details, headers_of, problem
from trappm.serving.schemas import (
    MAX_LIST,
    Question,
    Settings,
    openapi_body,
    questions_in,
    settings_in,
)
from trappm.serving.settings import ServingSettings

_DESCRIPTION = """What a deep-learning training step costs: time, memory, power, and what follows.
The fields mean what the arguments of `trappm.predict` mean, and the answers are the same."""


def create_app(settings: ServingSettings) -> FastAPI:
    """The application, with its snapshots loaded; `/openapi.json` describes its routes.

    There is no interactive documentation: FastAPI's page loads its scripts from elsewhere.

    Raises:
        SnapshotError: there is no such snapshot, or it is damaged.
    """
    metrics = Metrics()
    answerer = Answerer(settings, metrics)

    @contextlib.asynccontextmanager
    async def alive(_app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(answerer.snapshots.watch(settings.poll_s))
        try:
            yield
        finally:
            watching.cancel()
            answerer.close()

    app = FastAPI(
        title="TraPPM", version=__version__, description=_DESCRIPTION, lifespan=alive,
        docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.state.settings, app.state.answerer = settings, answerer
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    _tell_errors(app)
    _add_health(app, answerer, metrics)
    _add_predictions(app, answerer, settings)
    _add_snapshots(app, answerer)
    mount(app)  # the page, last: its files answer whatever no route does
    return app


def _add_health(app: FastAPI, answerer: Answerer, metrics: Metrics) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process lives."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, Any]:
        """It can answer, and these snapshots do."""
        return {"status": "ready", "snapshots": answerer.snapshots.ids}

    @app.get("/metrics", response_class=Response)
    async def told() -> Response:
        """For Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_predictions(app: FastAPI, answerer: Answerer, settings: ServingSettings) -> None:
    @app.post("/v1/predict", openapi_extra=openapi_body())
    async def predict(request: Request) -> Response:
        """What a step costs: the answer of `trappm predict --json`.

        One question as JSON, a list of them (the answer is a list), or an ONNX file as a form.
        """
        asked, several = await _asked(request, settings)
        told = []
        for one, models in asked:
            answers = await answerer.predict(one, models, client_of(request.scope))
            listed = one.devices is not None or isinstance(getattr(one, "model", None), list)
            told.append(_list(answers) if listed else answers[0].json)
        return _json(b"[%b]" % b", ".join(told) if several else told[0])

    @app.post("/v1/compare", openapi_extra=openapi_body())
    async def compare(request: Request) -> Response:
        """Devices side by side, all by default: the answer of `trappm compare --json`."""
        asked, several = await _asked(request, settings)
        told = []
        for one, models in asked:
            everywhere = one.device is None and one.devices is None
            wanted = one.model_copy(update={"devices": "all"}) if everywhere else one
            answers = await answerer.predict(wanted, models, client_of(request.scope))
            best = body(verdicts([answer.prediction for answer in answers]))
            told.append(b'{"predictions": %b, "best": %b}' % (_list(answers), best))
        return _json(b"[%b]" % b", ".join(told) if several else told[0])

    plain = app.openapi

    def openapi() -> dict[str, Any]:
        """With the schema of questions, which are read from the body as it is."""
        schema = plain()
        template = "#/components/schemas/{model}"
        _, defined = models_json_schema([(Question, "validation")], ref_template=template)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(defined["$defs"])
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_snapshots(app: FastAPI, answerer: Answerer) -> None:
    @app.get("/v1/snapshot")
    async def snapshot(name: str | None = None) -> Response:
        """The manifest of the snapshot in force, or of another one by id or alias."""
        found = await answerer.snapshots.named(name)
        return _json(body(found[0].manifest))

    @app.get("/v1/devices")
    async def devices() -> dict[str, Any]:
        """What there are heads for: by device and phase the metrics, and whose they are."""
        found: dict[str, Any] = {}
        for one in reversed(answerer.snapshots.current):
            for device, phases in one.heads.items():
                metrics = {str(phase): list(x.heads.metrics) for phase, x in phases.items()}
                found[device] = {"snapshot": one.id, "metrics": metrics}
        return {"devices": found, "default": answerer.snapshots.current[0].source_device}

    @app.post("/v1/reload")
    async def reload() -> dict[str, Any]:
        """Looks at once for what the alias means by now; questions under way are not disturbed."""
        changed = await answerer.snapshots.reload()
        return {"changed": changed, "snapshots": answerer.snapshots.ids}


async def _asked(
    request: Request, settings: ServingSettings
) -> tuple[list[tuple[Settings, list[Model]]], bool]:
    """The questions with their models, and whether a list was asked.

    Raises:
        InputError: the body is no question, or too many at once.
        TooLargeError: a file that is too large.
    """
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        return [await _uploaded(request, settings)], False
    found = questions_in(await request.body())
    questions = found if isinstance(found, list) else [found]
    asked: list[tuple[Settings, list[Model]]] = []
    for one in questions:
        names = one.model if isinstance(one.model, list) else [one.model]
        asked.append((one, [named_model(name, one.input_size) for name in names]))
    if sum(len(models) for _, models in asked) > MAX_LIST:
        raise InputError(f"more than {MAX_LIST} models at once; ask for some after the others")
    return asked, isinstance(found, list)


async def _uploaded(request: Request, settings: ServingSettings) -> tuple[Settings, list[Model]]:
    async with request.form(max_files=1, max_fields=4) as form:
        file, told = form.get("file"), form.get("question")
        if not isinstance(file, UploadFile) or isinstance(told, UploadFile):
            raise InputError("the form has no file; send an ONNX file as its field 'file'")
        asked = settings_in(told)
        upload = await asyncio.to_thread(Upload, file.file, settings.max_upload_bytes)
        return asked, [upload.model(file.filename, asked.input_size)]


def _list(found: list[Answer]) -> bytes:
    return b"[%b]" % b", ".join(answer.json for answer in found)


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _tell_errors(app: FastAPI) -> None:
    """Every error is told as problem details."""

    @app.exception_handler(TrappmError)
    async def ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, TrappmError)  # noqa: S101  (registered for these)
        return _problem(*problem(error))

    @app.exception_handler(HTTPException)
    async def of_http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        told = f"{error.detail}; see /openapi.json"
        response = _problem(error.status_code, details(error.status_code, told))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _problem(400, details(400, f"{where}: {first['msg']}; see /openapi.json"))


def _problem(status: int, told: dict[str, Any]) -> Response:
    return JSONResponse(told, status, headers=dict(headers_of(status)), media_type=MEDIA_TYPE)
