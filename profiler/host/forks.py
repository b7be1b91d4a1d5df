"""A fork server: runs a function in a fresh fork of a process that has torch and timm loaded.

    worker ── requests, kill ──> server (torch and timm imported, no thread, no CUDA context)
      ^  └──────── pid, exit ─────┘ └─ fork ─> child: runs the function, writes JSON lines
      └────── messages, output ──────────────────┘

The fork server of the standard library is one per process, imports the main module again, and
survives a killed worker while it has children. Here nothing survives the worker: the server ends
when its socket closes, and kills its child and all processes that the child has started. The end of
what server and children print is kept to explain a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trappm.profiler.errors import TrappmError

# Runs as the main program of a process of its own. It must stay single-threaded, or its forks would
# inherit locks that nothing will release.

MAX_REQUEST_BYTES = 1 << 16

_STRAYS_TIMEOUT_S = 5.0
"""Time to kill the processes that a child left behind."""
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def serve(control_fd: int, preload: Sequence[str]) -> None:
    """Run the server: import modules, then fork one child per request until the worker ends.

    Raises:
        RuntimeError: A module uses a GPU, so CUDA would fail in every child.
    """
    for module in preload:
        importlib.import_module(module)
        use = _use_of_gpu()
        if use is not None:
            raise RuntimeError(f"the import of {module} {use}: CUDA would fail in forks")
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


def _use_of_gpu() -> str | None:
    """Return how this process uses a GPU, or None; it may have loaded the driver's library."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if "/dev/nvidia" in target:
                return f"opened {target}"
    with open("/proc/self/maps", encoding="utf-8") as lines:
        libraries = {line.split(maxsplit=5)[-1].strip() for line in lines if "/libcuda.so" in line}
    for path in libraries:
        if ctypes.CDLL(path).cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED:
            return f"initialized {path}"
    return None


def _watch(pid: int, control: socket.socket) -> bool:
    """Wait for the child's end, or kill it on request; return False if the worker has ended."""
    worker_lives = True
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)  # the child does so, too; the first call counts
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
    """Kill the child and all processes that it has started; return the child's wait status."""
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
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before it could take us along


def _child(request: Mapping[str, Any], pipe: int, server: int) -> None:
    """Run the function and exit without clean-up, which is faster."""
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


Message = dict[str, Any]

_MAX_MESSAGE_BYTES = 64 << 20
_PRINTED_BYTES = 2000
_CHUNK_BYTES = 1 << 16
_START_TIMEOUT_S = 180.0
"""Time for the server's imports."""
_ANSWER_TIMEOUT_S = 30.0
"""Time for a fork or a kill, after which the server counts as stuck."""
_STOP_TIMEOUT_S = 5.0
"""Time for the server to end before it is killed."""


_SECRET_NAME = re.compile(
    r"PASSW|PASSPHRASE|_PWD|TOKEN|SECRET|CREDENTIAL|_KEY|APIKEY|CONNECTION_?STRING|^PG"
    r"|^TRAPPM_DATABASE$",
    re.IGNORECASE,
)
"""Names of variables with secrets; those with `PG` are read by libpq."""
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]*@")


def remove_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process which runs models may have.

    Passwords, tokens and keys are left out by name, and any URL that contains a password.
    """
    return {
        name: value
        for name, value in environment.items()
        if not _SECRET_NAME.search(name) and not _URL_WITH_PASSWORD.search(value)
    }


def forget_secrets() -> None:
    """Remove secrets from the environment of this process, which is about to run models."""
    for name in os.environ.keys() - remove_secrets(os.environ).keys():
        del os.environ[name]


class ForkServerError(TrappmError):
    """The fork server ended, never started or does not respond; the next fork restarts it."""


class ForkServer:
    """The worker's side: one warm server process, and one forked child at a time."""

    def __init__(
        self,
        preload: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        """Create the server; it starts with the first fork, and gets no secrets.

        Args:
            preload: Modules to import before any fork.
            environment: Environment of the server; by default the worker's.
            folder: Working directory of the server; by default the worker's.
        """
        self._preload = list(preload)
        self._environment = environment
        self._folder = folder
        self._owner_pid = os.getpid()
        self._is_warm = False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._output: int | None = None
        self._tail = b""
        self._child_pid: int | None = None

    @property
    def printed(self) -> str:
        """The end of what the server and its latest child have printed."""
        for _ in range(64):  # more than a pipe holds
            if not self._read_output():
                break
        return self._tail.decode(errors="replace").strip()

    def start(self) -> None:
        """Start the server unless it runs, and wait until it is ready.

        Raises:
            ForkServerError: It ended early, or took too long.
        """
        self.begin()
        if self._is_warm:
            return
        try:
            self._answer(_START_TIMEOUT_S)
        except ForkServerError as error:
            self.stop()
            raise ForkServerError(
                f"the measuring process could not start: {self.printed or error}"
            ) from error
        self._is_warm = True

    def begin(self) -> None:
        """Start the server unless it runs, without waiting.

        Raises:
            ForkServerError: It could not be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        self._tail, self._is_warm = b"", False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        self._control = ours
        try:
            code = (
                f"import sys; sys.path[:] = {[os.path.abspath(p) for p in sys.path]!r}; "
                "from trappm.profiler.host.forks import serve; "
                f"serve({theirs.fileno()}, {self._preload!r})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is for the worker, which then stops us
                cwd=self._folder,
                env={
                    **remove_secrets(
                        os.environ if self._environment is None else self._environment
                    ),
                    "OPENBLAS_NUM_THREADS": "1",  # no thread before the fork
                },
            )
        except OSError as error:
            self.stop()
            raise ForkServerError(f"the measuring process could not start: {error}") from error
        finally:
            theirs.close()
            os.close(output)

    def fork(self, function: str, argument: Message) -> Child:
        """Fork a child that calls `function` ("module:name") with the argument and a `send`.

        Raises:
            ForkServerError: The server could not be started, ended or did not respond.
        """
        self.start()
        assert self._control is not None  # noqa: S101  # started above
        self.printed  # noqa: B018  # what an earlier child has printed is not this one's
        self._tail = b""
        request = json.dumps({"function": function, "argument": argument}).encode()
        read_end, write_end = os.pipe()
        try:
            socket.send_fds(self._control, [request], [write_end])
            self._child_pid = int(self._answer(_ANSWER_TIMEOUT_S))
        except (OSError, ForkServerError) as error:
            os.close(read_end)
            self.stop()
            raise ForkServerError(f"the measuring process ended unexpectedly: {error}") from error
        finally:
            os.close(write_end)
        return Child(self, read_end)

    def stop(self) -> None:
        """End the server and its child. May be called again."""
        if self._control is not None:
            self._control.close()  # for a healthy server, the sign to end with all its children
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_TIMEOUT_S)
            self._process = None
        if self._child_pid is not None:
            # Only a server that did not end by itself has left anything of the child's group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child_pid, signal.SIGKILL)
            self._child_pid = None
        if self._output is not None:
            self.printed  # noqa: B018  # the last words
            os.close(self._output)
            self._output = None

    def wait(self, message_pipe: int | None, timeout_s: float) -> set[str]:
        """Wait for a `message` of the child or a `packet` of the server.

        Output is read away, so that a child that prints much does not block.
        """
        assert self._control is not None  # noqa: S101  # the waiting process has started it
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, "packet")
            if message_pipe is not None:
                selector.register(message_pipe, selectors.EVENT_READ, "message")
            if self._output is not None:
                selector.register(self._output, selectors.EVENT_READ, "printed")
            ready = {key.data for key, _ in selector.select(max(0.0, timeout_s))}
        if "printed" in ready:
            self._read_output()
        return ready - {"printed"}

    def packet(self) -> bytes:
        """Return the next packet of the server.

        Raises:
            ForkServerError: The server has ended.
        """
        assert self._control is not None  # noqa: S101  # the waiting process has started it
        try:
            packet = self._control.recv(MAX_REQUEST_BYTES)
        except OSError as error:
            raise ForkServerError(f"the process to fork from cannot be heard: {error}") from error
        if not packet:
            raise ForkServerError("the process that measurements are forked from was killed")
        return packet

    def kill_child(self) -> int:
        """Have the child killed and return its exit code.

        Raises:
            ForkServerError: The server has ended, or the child does not end.
        """
        assert self._control is not None  # noqa: S101  # there is a child
        with contextlib.suppress(OSError):
            self._control.send(b"kill")
        return int(self._answer(_ANSWER_TIMEOUT_S))

    def forget_child(self) -> None:
        """Forget the child's process id, which may be used again from now on."""
        self._child_pid = None

    def _answer(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while "packet" not in self.wait(None, deadline - time.monotonic()):
            if time.monotonic() > deadline:
                raise ForkServerError(
                    f"the process that measurements are forked from is silent for {timeout_s:g} s"
                )
        return self.packet()

    def _read_output(self) -> bool:
        """Read some of the output; return False if there is no more for now."""
        if self._output is None:
            return False
        try:
            data = os.read(self._output, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._tail = (self._tail + data)[-_PRINTED_BYTES:]
        return bool(data)

    def __del__(self) -> None:
        try:  # contextlib may be gone when the interpreter ends
            if self._owner_pid == os.getpid():  # not a fork of the worker, which has none of it
                self.stop()
        except (AttributeError, OSError):
            pass


class Child:
    """One forked child, as the worker sees it."""

    def __init__(self, server: ForkServer, read_end: int) -> None:
        self._server = server
        self._pipe = read_end
        self._rest = b""
        self.exit_code: int | None = None
        """Set at its end; -9 after SIGKILL. None also if the server ended."""

    def messages(self, deadline: Callable[[], float]) -> Iterator[Message]:
        """Yield what the child sends, until it ends.

        Args:
            deadline: Called before every wait; in seconds of `time.monotonic`.

        Raises:
            TimeoutError: The deadline has passed, and the child still runs (see `kill`).
            ForkServerError: The server has ended, or the pipe has something else than messages.
        """
        pipe: int | None = self._pipe
        while self.exit_code is None:
            remaining_s = deadline() - time.monotonic()
            ready = self._server.wait(pipe, remaining_s)
            if remaining_s <= 0 and "packet" not in ready:
                raise TimeoutError
            if "message" in ready:
                data = os.read(self._pipe, _CHUNK_BYTES)
                if not data:
                    pipe = None  # it has closed its end, and may continue without
                yield from self._lines(data)
            if "packet" in ready:
                self._on_end(int(self._server.packet()))
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, _CHUNK_BYTES):
                yield from self._lines(data)

    def kill(self) -> None:
        """Kill the child and wait for its end.

        Raises:
            ForkServerError: The server has ended, or the child does not end.
        """
        if self.exit_code is None:
            self._on_end(self._server.kill_child())

    def close(self) -> None:
        os.close(self._pipe)

    def _on_end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._server.forget_child()

    def _lines(self, data: bytes) -> Iterator[Message]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            if len(self._rest) > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a line of more than {_MAX_MESSAGE_BYTES >> 20} MiB")
            messages = [json.loads(line) for line in lines]
        except ValueError as error:
            raise ForkServerError(
                f"something else wrote to the pipe of the measuring process: {error}"
            ) from error
        yield from messages
