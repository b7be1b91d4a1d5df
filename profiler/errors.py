"""All errors that TraPPM raises. A message says what is wrong, the value, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class TrappmError(Exception):
    """Root of all errors: the work could not be done (exit status 1)."""

    exit_status = 1


class InputError(TrappmError):
    """A wrong name, value, file or folder from the user (exit status 2)."""

    exit_status = 2


class UnknownArchitectureError(InputError):
    """A model name that timm does not have, or cannot build as asked."""


class ModelFileError(InputError):
    """A file that is not a readable ONNX model, or beyond our limits."""


class UnsupportedModelError(TrappmError):
    """A valid model without a graph or a step; the message says why."""


class BatchOrderError(UnsupportedModelError):
    """A step whose operators depend on the batch size, such as a loop over samples."""


class UnevenSizesError(UnsupportedModelError):
    """A step with tensors that do not grow evenly with the batch, as of all pairs of samples."""


class TraceTimeoutError(TrappmError):
    """A step whose trace took longer than its limit, and was ended."""


class DeviceError(InputError):
    """An unknown device key, or a device that is not on this machine."""


class StoreError(TrappmError):
    """The label store cannot be opened, upgraded or written."""


class StoreAccessError(StoreError, InputError):
    """A label store that is missing, newer than this version, or read-only."""


class SnapshotError(InputError):
    """A snapshot that is missing, damaged, of another origin, or without the wanted head."""


class CampaignError(TrappmError):
    """A campaign that cannot start, continue or be found."""


class MissingLibraryError(InputError):
    """A library that an optional feature needs and that is not installed."""


def is_of_this_machine(error: BaseException) -> bool:
    """Return whether an error is want of memory, disk or a library, which may pass."""
    kinds = MemoryError, OSError, ImportError, MissingLibraryError
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class if it has none."""
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


_PYDANTIC_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Tuple|Set|Value) should ")


def fault_text(fault: Mapping[str, Any]) -> str:
    """Return what a fault that pydantic found says, in our words."""
    if fault["type"] in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        return "is missing"
    return _PYDANTIC_SUBJECT.sub("must ", str(fault["msg"]).removeprefix("Value error, "))


def storable(text: str) -> str:
    """Return the text without NUL and lone surrogates, which databases refuse."""
    return (
        text.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


@contextmanager
def from_extra(extra: str, need: str) -> Iterator[None]:
    """Turn failing imports into an error that names the missing extra.

    Args:
        extra: Extra of pyproject.toml, such as evaluate.
        need: What needs it; the beginning of the message.

    Raises:
        MissingLibraryError: An imported package is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingLibraryError(
            f"{need} needs more than is installed ({one_line(error)}); install it with: "
            f"pip install 'trappm[{extra}]'"
        ) from error


_LISTED = 20
"""Number of names to list where none is similar."""


def nearest(
    name: str, known: Iterable[str], *, otherwise: str | None = None, cutoff: float = 0.6
) -> str:
    """Return the end of an error message: similar names, or else all names.

    Args:
        name: Unknown name.
        known: Known names.
        otherwise: Text to use instead of a list where no name is similar.
        cutoff: Least similarity of a name, by difflib.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=cutoff)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    if otherwise is not None:
        return otherwise
    if not names:
        return "there are none yet"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"there are: {', '.join(names[:_LISTED])}{more}"
