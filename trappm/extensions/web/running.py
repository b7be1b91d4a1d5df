"""Server process with one event loop and threads for computations.

Run several processes behind a reverse proxy for higher load (docs/serving.md).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from trappm.extensions.web.gate import ServingSettings
from trappm.profiler.errors import InputError
from trappm.profiler.files import read_plain

TOKEN_VARIABLE = "TRAPPM_TOKEN"  # noqa: S105  (its name)
MIN_TOKEN_LENGTH = 16
"""Minimum length of a token in characters."""
_MAX_TOKEN_BYTES = 4096
_SWITCH_S = 0.0005
"""Thread switch interval; a tenth of Python's default keeps the event loop responsive."""
_STOP_S = 30
"""Time for requests in flight to finish when the server stops."""


def serve(
    settings: ServingSettings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until interrupted.

    Args:
        settings: Settings of the application.
        host: Address to listen on.
        port: Port; 0 for any free port.
        listening: Called with the URL when the server accepts connections.

    Raises:
        SnapshotError: The snapshot does not exist or is damaged.
        InputError: The address or port cannot be used.
    """
    import uvicorn

    from trappm.extensions.web.app import create_app
    from trappm.extensions.web.connections import LimitedConnection

    place = _listen(host, port)
    with place:
        app = create_app(settings)
        sys.setswitchinterval(_SWITCH_S)
        config = uvicorn.Config(
            app,
            http=LimitedConnection,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_STOP_S,
            h11_max_incomplete_event_size=64 << 10,
        )
        if listening is not None:
            listening(address_of(host, place.getsockname()[1]))
        # On Ctrl-C, uvicorn logs the cancellation and re-raises the signal, with tracebacks.
        logging.getLogger("uvicorn.error").addFilter(
            lambda record: "CancelledError" not in record.getMessage()
        )
        interrupts: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        try:
            uvicorn.Server(config).run([place])
        finally:
            signal.signal(signal.SIGINT, before)
        if interrupts:
            raise KeyboardInterrupt


def address_of(host: str, port: int) -> str:
    shown = "127.0.0.1" if host in {"0.0.0.0", ""} else host  # noqa: S104  (shown, not opened)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def token_for(host: str, file: Path | None) -> str | None:
    """Return the token that callers must send, from a file or TRAPPM_TOKEN.

    Raises:
        InputError: The token is required for a public address but missing, it is too short, or
            its file is unreadable or world-writable.
    """
    if file is not None:
        try:
            token = read_plain(file, _MAX_TOKEN_BYTES).decode().strip()
            writable = file.stat().st_mode & stat.S_IWOTH
        except (InputError, OSError, UnicodeDecodeError) as error:
            raise InputError(f"the token file {file} cannot be read: {error}") from error
        if writable:
            raise InputError(f"the token file {file} is world-writable; run: chmod o-w {file}")
    else:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token and (file is not None or not is_loopback(host)):
        raise InputError(
            f"refusing to listen at {host} without a token; set {TOKEN_VARIABLE} or give "
            "--token-file, or listen at 127.0.0.1"
        )
    if token and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
        raise InputError(
            f"the token must have at least {MIN_TOKEN_LENGTH} printable ASCII characters; "
            "generate one with: openssl rand -hex 32"
        )
    return token or None


def hosts_for(host: str, token: str | None) -> tuple[str, ...] | None:
    """Return the allowed Host headers without a token (loopback names); None for any host."""
    here = f"[{host}]" if ":" in host else host.lower()
    return None if token is not None else ("127.0.0.1", "localhost", "[::1]", here)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place = socket.socket(family, socket.SOCK_STREAM)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((host, port))
        place.listen(1024)
    except (OSError, OverflowError) as error:
        place.close()
        raise InputError(
            f"cannot listen on {host}:{port}: {error}; choose another --host or --port"
        ) from error
    return place
