"""The server's side of `forks`: warms up, forks, watches each child and ends its family.

Runs as the main program of a process of its own. It must stay single-threaded, or its forks would
inherit locks that nothing will release.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

MAX_REQUEST_BYTES = 1 << 16

_STRAYS_TIMEOUT_S = 5.0
"""How long to kill what a child has left behind, before going on without its end."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def serve(control_fd: int, preload: Sequence[str]) -> None:
    """The server's whole life: warm up, then fork a child per request until the worker is gone."""
    for module in preload:
        importlib.import_module(module)
    # Orphans of a child become ours, so that none is left behind.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # What is warm stays: children neither scan nor copy these objects.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=control_fd) as control, contextlib.suppress(ConnectionError):
        control.send(b"warm")
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
            if not request:
                break
            if not descriptors:
                continue  # a kill that came too late: its child had just ended
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                control.close()
                _child(json.loads(request), descriptors[0], server)
            os.close(descriptors[0])
            if not _watch(pid, control):
                break
    os._exit(0)  # torch's own clean-up takes long, and nothing needs it


def _watch(pid: int, control: socket.socket) -> bool:
    """Waits for the child's end, killing it on request; False when the worker is gone."""
    worker_lives = True
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)  # the child does so too: whoever comes first
    with contextlib.suppress(OSError), selectors.DefaultSelector() as selector:
        process = os.pidfd_open(pid)
        selector.register(process, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        control.send(str(pid).encode())
        while not any(key.fd == process for key, _ in selector.select()):
            worker_lives = bool(control.recv(MAX_REQUEST_BYTES))
            os.kill(pid, signal.SIGKILL)
            if not worker_lives:
                break
        os.close(process)
    status = _end_family(pid)
    try:
        control.send(str(os.waitstatus_to_exitcode(status)).encode())
    except OSError:
        return False
    return worker_lives


def _end_family(pid: int) -> int:
    """Kills the child and whatever it has started; the child's wait status."""
    # The whole group in one stroke, which no fork outruns.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    # Who left the group is our child by now, or a descendant of one.
    deadline = time.monotonic() + _STRAYS_TIMEOUT_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                _kill_strays()
    return status


def _kill_strays() -> None:
    import psutil  # hardly ever needed

    for stray in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            stray.kill()
    time.sleep(0.001)


def end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent, which has forked it, dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before it could take us along


def _child(request: Mapping[str, Any], pipe: int, server: int) -> None:
    """Runs the function and leaves without any clean-up: the kernel frees faster."""
    status, own_pid = 1, os.getpid()
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        end_with(server)
        module, _, name = request["function"].partition(":")

        def send(message: Mapping[str, Any]) -> None:
            if os.getpid() != own_pid:
                os._exit(0)  # the model has forked, and its copy came back to us
            data = json.dumps(message).encode() + b"\n"
            while data:
                data = data[os.write(pipe, data) :]

        getattr(importlib.import_module(module), name)(request["argument"], send)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # A model may have closed them, or put something else in their place.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)
