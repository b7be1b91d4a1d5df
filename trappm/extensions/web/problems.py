"""HTTP error responses: problem details (RFC 9457) of TraPPM's errors.

    {"type": "urn:trappm:problem:snapshot", "title": ..., "status": 404, "detail": ..., "hint": ...}

`detail` is the error message of the command line, `hint` its part with the suggested action.
"""

from __future__ import annotations

import re
from http import HTTPStatus

from starlette.responses import JSONResponse

from trappm.profiler.errors import (
    InputError,
    ModelFileError,
    SnapshotError,
    StoreError,
    TrappmError,
    UnknownArchitectureError,
    UnsupportedModelError,
)
from trappm.profiler.host.environment import VARIABLE, data_folder


class ServingError(TrappmError):
    """Rejected request with its HTTP status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


_STATUS: tuple[tuple[type[TrappmError], int], ...] = (
    (UnknownArchitectureError, 404),
    (SnapshotError, 404),
    (ModelFileError, 422),
    (UnsupportedModelError, 422),
    (StoreError, 503),
    (InputError, 400),
    (TrappmError, 422),
)
"""Status by error class; the first match applies."""

_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}


def problem(error: TrappmError) -> JSONResponse:
    """Return the response for a TraPPM error."""
    if isinstance(error, ServingError):
        return refusal(error.status, str(error))
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__.removesuffix("Error"))
    return refusal(status, without_home(str(error)), f"urn:trappm:problem:{words.lower()}")


def without_home(text: str) -> str:
    """Return the text with the name of the server's data folder in place of its path."""
    return text.replace(str(data_folder()), VARIABLE)


def refusal(status: int, detail: str, kind: str = "about:blank") -> JSONResponse:
    """Return a response with problem details."""
    detail = " ".join(detail.split())
    fields = {
        "type": kind,
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "hint": detail.partition("; ")[2] or None,
    }
    return JSONResponse(fields, status, _HEADERS.get(status), "application/problem+json")
