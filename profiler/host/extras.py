"""Libraries that only an extra brings: where one is missing, one line names the extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trappm.profiler.errors import InputError, one_line


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
