"""Puts the page into an application: its JSON under `/api`, its files at the root."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.staticfiles import StaticFiles

from trappm.extensions.web.page.api import router

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.responses import Response
    from starlette.types import Scope

FILES = Path(__file__).parent / "static"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated by its tag, so that an upgrade is seen at once
}


def mount(app: FastAPI) -> None:
    """Adds the page; after all other routes, since it answers whatever they do not."""
    app.include_router(router)
    app.mount("/", _Files(directory=FILES, html=True), name="page")


class _Files(StaticFiles):
    """The page's files, with headers that let the browser ask this server only."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
