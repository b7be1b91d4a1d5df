"""The web application: routes, checks, errors, and the page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse

from trappm import __version__
from trappm.extensions.web.answerer import Answerer
from trappm.extensions.web.gate import Gate
from trappm.extensions.web.metrics import Metrics
from trappm.extensions.web.page.mounting import mount
from trappm.extensions.web.problems import MEDIA_TYPE, details, headers_of, problem
from trappm.extensions.web.routes import router
from trappm.extensions.web.settings import ServingSettings
from trappm.profiler.errors import InputError, TrappmError

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
    app.state.settings = settings
    app.state.answerer = answerer
    if settings.hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=settings.hosts)
    app.add_middleware(Gate, settings=settings, metrics=metrics)  # what is added last is outermost
    _add_error_handlers(app)
    app.include_router(router)
    mount(app)  # the page, last: its files answer whatever no route does
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Every error becomes problem details."""

    @app.exception_handler(TrappmError)
    async def ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, TrappmError)  # noqa: S101  (registered for these)
        return _problem(*problem(error))

    @app.exception_handler(HTTPException)
    async def of_http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        if isinstance(error.__cause__, TrappmError):  # the gate's, while FastAPI read the body
            return _problem(*problem(error.__cause__))
        detail = f"{error.detail}; see /openapi.json"
        response = _problem(error.status_code, details(error.status_code, detail))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        first = error.errors()[0]
        where = ".".join(str(x) for x in first["loc"] if isinstance(x, int) or x.isidentifier())
        value = repr(first.get("input"))[:60]
        shown = "" if first["type"] in {"missing", "json_invalid"} else f" ({value})"
        return _problem(*problem(InputError(f"{where}: {first['msg']}{shown}; see /openapi.json")))


def _problem(status: int, fields: dict[str, Any]) -> Response:
    return JSONResponse(fields, status, headers=dict(headers_of(status)), media_type=MEDIA_TYPE)
