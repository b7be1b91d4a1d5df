"""Errors over HTTP: problem details (RFC 9457) made of our own errors.

    {"type": "urn:trappm:problem:snapshot", "title": ..., "status": 404, "detail": ..., "hint": ...}

`detail` is the line that the command prints, `hint` the part of it that says what to do next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from trappm.profiler.errors import (
    InputError,
    ModelFileError,
    SnapshotError,
    StoreError,
    TrappmError,
    UnknownArchitectureError,
    UnsupportedModelError,
)

MEDIA_TYPE = "application/problem+json"


class ServingError(TrappmError):
    """Root of what goes wrong between caller and server."""

    status = 503


class BusyError(ServingError):
    """More requests at once than there is room for; later they may be answered."""


class TimeoutExceededError(ServingError):
    """The work took longer than a request may."""

    status = 504


class TooLargeError(ServingError):
    """A body that is larger than the server takes."""

    status = 413


class UnauthorizedError(ServingError):
    """A request with no token, or with a wrong one."""

    status = 401


class ForbiddenError(ServingError):
    """A request from another site's page."""

    status = 403


_STATUS: tuple[tuple[type[TrappmError], int], ...] = (
    (UnknownArchitectureError, 404),
    (SnapshotError, 404),
    (ModelFileError, 422),
    (UnsupportedModelError, 422),
    (StoreError, 503),
    (InputError, 400),
    (TrappmError, 422),
)
"""The first one that fits."""

RETRY_AFTER_S = 1


def status_of(error: TrappmError) -> int:
    if isinstance(error, ServingError):
        return error.status
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def problem(error: TrappmError) -> tuple[int, dict[str, Any]]:
    """Status and problem details of an error of ours."""
    status, detail = status_of(error), " ".join(str(error).split())
    _, _, hint = detail.partition("; ")
    return status, details(status, detail, hint=hint or None, kind=type(error).__name__)


def details(
    status: int, detail: str, *, hint: str | None = None, kind: str | None = None
) -> dict[str, Any]:
    name = (kind or "").removesuffix("Error")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()
    return {
        "type": f"urn:trappm:problem:{words}" if words else "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "hint": hint,
    }


def headers_of(status: int) -> Mapping[str, str]:
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
