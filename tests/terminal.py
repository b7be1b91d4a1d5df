"""A terminal as a user has one: a command in a pseudo-terminal, and the screen that it draws."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyte

COLUMNS, LINES = 80, 30


class Terminal:
    """Runs a command with the terminal as its input, output, errors and source of Ctrl-C.

    Attributes:
        raw: what the command has written so far, with the terminal's commands in it.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        columns: int = COLUMNS,
    ) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))

        def take_the_terminal() -> None:
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a runner in the background ignores it

        environment = {k: v for k, v in env.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd,
            env={**environment, "TERM": "xterm-256color"},
            preexec_fn=take_the_terminal,  # noqa: PLW1509
        )  # fmt: skip
        os.close(theirs)
        self._ours = ours
        self.raw = ""
        self._screen = pyte.HistoryScreen(columns, LINES, history=100_000)
        self._stream = pyte.ByteStream(self._screen)
        self._frames: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # reads share characters
        while True:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # everybody has closed it
                break
            if not data:
                break
            self._stream.feed(data)
            self.raw += decoder.decode(data)
            self._frames.append(self.screen)
        os.close(self._ours)

    @property
    def screen(self) -> str:
        """What stands on the screen now."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    @property
    def frames(self) -> str:
        """Everything that ever stood on the screen, one state after the other."""
        return "\n".join(self._frames)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait(self, timeout_s: float) -> int:
        """The exit status; all that was written has been read by then."""
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        return status

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.frames:
            assert self.process.poll() is None, self.raw
            assert time.monotonic() < deadline, f"{text!r} never came:\n{self.raw}"
            time.sleep(0.05)
