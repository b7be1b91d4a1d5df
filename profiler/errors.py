"""Every error that TraPPM raises on purpose, in one small tree.

`TrappmError` is the root: the command line turns it into one line and an exit status, and a caller
from Python can catch everything of ours with one `except`. A message says what is wrong, with which
value, and what to do next. This file stands on the ground floor because every room raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class TrappmError(Exception):
    """Root of all errors raised by TraPPM: the work could not be done (exit status 1)."""

    exit_status = 1


class InputError(TrappmError):
    """What the user asked for cannot be right: a name, value, file or folder (exit status 2)."""

    exit_status = 2


class UnknownArchitectureError(InputError):
    """No such timm model, or one that cannot be built as asked."""


class ModelFileError(InputError):
    """A file that is not a readable ONNX model within our limits."""


class UnsupportedModelError(TrappmError):
    """A model that is fine in itself, but of which no graph can be made; the message says why."""


class BatchOrderError(UnsupportedModelError):
    """A step that does other things at another batch size, such as a loop over its samples."""


class DeviceError(InputError):
    """A device key that is unknown, or a device that is not on this machine."""


class StoreError(TrappmError):
    """The label store cannot be opened, upgraded or written."""


class StoreAccessError(StoreError, InputError):
    """What was named as the label store is none, is of a newer version, or cannot be written."""


class SnapshotError(InputError):
    """A snapshot that is missing, damaged, foreign, or lacks the head that was asked for."""


class CampaignError(TrappmError):
    """A campaign that cannot start, go on or be found."""


def one_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind if it says nothing."""
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def storable(text: str) -> str:
    """The text with marks in place of what databases refuse: NUL, and halves of surrogate pairs."""
    return (
        text.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


@contextmanager
def from_extra(extra: str, need: str) -> Iterator[None]:
    """Inside, an import that fails becomes an error that names the extra.

    Args:
        extra: of pyproject.toml, such as evaluate.
        need: what cannot be done without it; begins the message.

    Raises:
        InputError: what is imported is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise InputError(
            f"{need} needs more than is installed ({one_line(error)}); install it with: "
            f"pip install 'trappm[{extra}]'"
        ) from error
