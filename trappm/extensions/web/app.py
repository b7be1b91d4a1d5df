"""The web application: routes, checks, errors, and the page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from trappm import __version__
from trappm.extensions.web.answerer import Answerer
from trappm.extensions.web.gate import Gate
from trappm.extensions.web.metrics import Metrics
from trappm.extensions.web.page.api import router as page_router
from trappm.extensions.web.problems import problem, refusal
from trappm.extensions.web.routes import router
from trappm.extensions.web.settings import ServingSettings
from trappm.profiler.errors import InputError, TrappmError

_DESCRIPTION = """Time, memory and power of a deep-learning training step.
The fields mean what the arguments of `trappm.predict` mean, and the answers are the same."""
FILES = Path(__file__).parent / "page/static"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated by its tag, so that an upgrade is seen at once
}


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
    app.include_router(page_router)
    app.mount("/", _Files(directory=FILES, html=True), name="page")  # last: it takes every path
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Every error becomes problem details."""

    @app.exception_handler(TrappmError)
    async def ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, TrappmError)  # noqa: S101  (registered for these)
        return problem(error)

    @app.exception_handler(HTTPException)
    async def of_http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        if isinstance(error.__cause__, TrappmError):  # the gate's, while FastAPI read the body
            return problem(error.__cause__)
        response = refusal(error.status_code, f"{error.detail}; see /openapi.json")
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        first = error.errors()[0]
        where = ".".join(str(x) for x in first["loc"] if isinstance(x, int) or x.isidentifier())
        value = repr(first.get("input"))[:60]
        shown = "" if first["type"] in {"missing", "json_invalid"} else f" ({value})"
        return problem(InputError(f"{where}: {first['msg']}{shown}; see /openapi.json"))


class _Files(StaticFiles):
    """The page's files, with headers that let the browser connect to this server only."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
