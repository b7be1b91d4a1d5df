"""Web application with its routes, checks, error handlers and page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from trappm import __version__
from trappm.extensions.web.answerer import Answerer
from trappm.extensions.web.gate import DATA, HEALTH, Gate, ServingSettings
from trappm.extensions.web.metrics import Metrics
from trappm.extensions.web.page.api import router as page_router
from trappm.extensions.web.problems import problem, refusal
from trappm.extensions.web.routes import router
from trappm.extensions.web.schemas import FIELDS
from trappm.prediction.requests import request_fault
from trappm.profiler.errors import TrappmError

_DESCRIPTION = """Time, memory and power of a deep-learning training step.
Fields and responses correspond to the arguments and results of `trappm.predict`."""
FILES = Path(__file__).parent / "page/static"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated by ETag, so that an upgrade is visible at once
}


def create_app(settings: ServingSettings) -> FastAPI:
    """Return the application with loaded snapshots; `/openapi.json` describes its routes.

    Interactive documentation is disabled, because FastAPI's page loads scripts from other hosts.

    Raises:
        SnapshotError: The snapshot does not exist or is damaged.
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
    app.add_middleware(Gate, settings=settings, metrics=metrics)  # the last one is the outermost
    _add_error_handlers(app)
    app.include_router(router)
    app.include_router(page_router)
    app.router.routes.append(_Page("/", _Files(directory=FILES, html=True), name="page"))
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Convert every error into problem details."""

    @app.exception_handler(TrappmError)
    async def ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, TrappmError)  # noqa: S101  (registered for these)
        return problem(error)

    @app.exception_handler(HTTPException)
    async def of_http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        if isinstance(error.__cause__, TrappmError):  # raised by Gate while reading the body
            return problem(error.__cause__)
        response = refusal(error.status_code, f"{error.detail}; see /openapi.json")
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        return problem(request_fault(error.errors()[0], FIELDS, "see /openapi.json"))


class _Page(Mount):
    """Every path that is not of the API, so that another method on a route of it gives 405."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        is_of_api = scope["path"] in HEALTH or scope["path"].startswith(DATA)
        return (Match.NONE, {}) if is_of_api else super().matches(scope)


class _Files(StaticFiles):
    """Static files of the page, with headers that restrict the browser to this server."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
