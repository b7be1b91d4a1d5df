"""A fork server of our own: runs a function in a fresh fork of a process that is already warm.

    worker ── requests, kill ──> server (torch and timm imported, no thread, no CUDA context)
      ^  └──────── pid, exit ─────┘ └─ fork ─> child: runs the function, writes JSON lines
      └────────────── pipe ──────────────────────┘

The standard library's fork server is one per process, imports the caller's main module again, and
lives on as long as a child of a killed worker does. This one belongs to its `ForkServer`. Nothing
outlives the worker: the server sees the worker's end of the socket close, kills its child and ends,
and a child is killed by the kernel when the server dies. What the server and its children print
goes to a memory file, whose end explains a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from profiler.errors import TrappmError

Send = Callable[[Mapping[str, Any]], None]
Message = dict[str, Any]

_MAX_REQUEST_BYTES = 1 << 16
_PRINTED_BYTES = 2000
_PR_SET_PDEATHSIG = 1


class ForkServerError(TrappmError):
    """The fork server ended, or never came up; `printed` may say why. The next fork starts one."""


class ForkServer:
    """The worker's side: one warm server process, one forked child at a time."""

    def __init__(self, preload: Sequence[str], *, start_timeout_s: float = 180.0) -> None:
        self._preload = list(preload)
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._printed = os.memfd_create("trappm-fork-server")
        # Every writer appends, so that emptying the file between forks empties it for all.
        flags = fcntl.fcntl(self._printed, fcntl.F_GETFL)
        fcntl.fcntl(self._printed, fcntl.F_SETFL, flags | os.O_APPEND)

    @property
    def printed(self) -> str:
        """The end of what the server and its latest child have printed."""
        size = os.fstat(self._printed).st_size
        tail = os.pread(self._printed, _PRINTED_BYTES, max(0, size - _PRINTED_BYTES))
        return tail.decode(errors="replace").strip()

    def start(self) -> None:
        """Starts the server unless it runs, and waits until it is warm.

        Raises:
            ForkServerError: it ended before it was warm, or took longer than `start_timeout_s`.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        os.ftruncate(self._printed, 0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from profiler.forks import serve; "
                f"serve({theirs.fileno()}, {self._preload!r})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                start_new_session=True,  # a Ctrl-C is for the worker, which then stops us
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # no thread before the fork
            )
        self._control = ours
        ours.settimeout(self._start_timeout_s)
        try:
            warm = ours.recv(_MAX_REQUEST_BYTES)
        except TimeoutError:
            warm = b""
        ours.settimeout(None)
        if not warm:
            self.stop()
            raise ForkServerError(
                f"the measuring process could not start: {self.printed or 'timeout'}"
            )

    def fork(self, function: str, argument: Message) -> Child:
        """Forks a child that calls `function` ("module:name") with the argument and a `Send`.

        Raises:
            ForkServerError: the server could not be started, or died when it was asked.
        """
        self.start()
        assert self._control is not None  # noqa: S101  # started above
        os.ftruncate(self._printed, 0)
        request = json.dumps({"function": function, "argument": argument}).encode()
        read_end, write_end = os.pipe()
        try:
            socket.send_fds(self._control, [request], [write_end])
            if not self._control.recv(_MAX_REQUEST_BYTES):
                raise ConnectionResetError("the server closed its socket")
        except OSError as error:
            os.close(read_end)
            self.stop()
            raise ForkServerError(f"the measuring process died: {error}") from error
        finally:
            os.close(write_end)
        return Child(self._control, read_end)

    def stop(self) -> None:
        """Ends the server and whatever child it has. May be called again."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            # The closed socket is enough for a healthy server; a stopped one needs the kill.
            # Its child goes with it either way.
            self._process.kill()
            self._process.wait()
            self._process = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.stop()
            os.close(self._printed)


class Child:
    """One forked child, as the worker sees it."""

    def __init__(self, control: socket.socket, read_end: int) -> None:
        self._control = control
        self._pipe = read_end
        self._rest = b""
        self.exit_code: int | None = None
        """Set once it has ended; -9 when a SIGKILL ended it. None also when the server died."""

    def messages(self, deadline: Callable[[], float]) -> Iterator[Message]:
        """What the child sends, until it ends.

        `deadline` is asked before every wait, in seconds of `time.monotonic`.

        Raises:
            TimeoutError: the deadline has passed; the child still runs (see `kill`).
            ForkServerError: the server has died, and the child with it.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            selector.register(self._control, selectors.EVENT_READ)
            while self.exit_code is None:
                ready = selector.select(max(0.0, deadline() - time.monotonic()))
                if not ready:
                    raise TimeoutError
                descriptors = {key.fd for key, _ in ready}
                if self._pipe in descriptors:
                    data = os.read(self._pipe, 1 << 20)
                    if not data:
                        selector.unregister(self._pipe)
                    yield from self._lines(data)
                if self._control.fileno() in descriptors:
                    self._take_exit()
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 20):
                yield from self._lines(data)

    def kill(self) -> None:
        """Kills the child and waits for its end.

        Raises:
            ForkServerError: the server has died, and the child with it.
        """
        if self.exit_code is None:
            with contextlib.suppress(OSError):
                self._control.send(b"kill")
            self._take_exit()

    def close(self) -> None:
        os.close(self._pipe)

    def _take_exit(self) -> None:
        try:
            packet = self._control.recv(_MAX_REQUEST_BYTES)
        except OSError:
            packet = b""
        if not packet:
            raise ForkServerError("the process that measurements are forked from was killed")
        self.exit_code = int(packet)

    def _lines(self, data: bytes) -> Iterator[Message]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def serve(control_fd: int, preload: Sequence[str]) -> None:
    """The server's whole life: warm up, then fork a child per request until the worker is gone."""
    for module in preload:
        importlib.import_module(module)
    # What is warm stays: children neither scan nor copy these objects.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=control_fd) as control:
        control.send(b"warm")
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 1)
            if not request:
                return
            if not descriptors:
                continue  # a kill that came too late: its child had just ended
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                control.close()
                _child(json.loads(request), descriptors[0], server)
            os.close(descriptors[0])
            if not _watch(pid, control):
                return


def _watch(pid: int, control: socket.socket) -> bool:
    """Waits for the child's end, killing it when told to; False when the worker is gone."""
    worker_lives = True
    with contextlib.suppress(OSError), selectors.DefaultSelector() as selector:
        process = os.pidfd_open(pid)
        selector.register(process, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        control.send(b"forked")
        while not any(key.fd == process for key, _ in selector.select()):
            worker_lives = bool(control.recv(_MAX_REQUEST_BYTES))
            os.kill(pid, signal.SIGKILL)
            if not worker_lives:
                break
        os.close(process)
    # Whatever the child itself has started goes with it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    try:
        control.send(str(os.waitstatus_to_exitcode(status)).encode())
    except OSError:
        return False
    return worker_lives


def _child(request: Message, pipe: int, server: int) -> None:
    """Runs the function and leaves without any clean-up: the kernel frees faster."""
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)  # it died before it could take us along
        module, _, name = request["function"].partition(":")

        def send(message: Mapping[str, Any]) -> None:
            data = json.dumps(message).encode() + b"\n"
            while data:
                data = data[os.write(pipe, data) :]

        getattr(importlib.import_module(module), name)(request["argument"], send)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
