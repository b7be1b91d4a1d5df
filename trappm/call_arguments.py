"""Wrong arguments of the functions of `trappm` as errors of one line, not as `TypeError`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from trappm.profiler.errors import InputError
from trappm.profiler.nearest import nearest

P = ParamSpec("P")
R = TypeVar("R")


def checked_call(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise InputError for arguments that it does not take."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            for name in kwargs:
                if name not in signature.parameters:
                    raise unknown_argument(function, name) from None
            raise InputError(
                f"{function.__name__}() has the wrong arguments: {error}; see "
                f"help(trappm.{function.__name__})"
            ) from None
        return function(*args, **kwargs)

    return checked


def unknown_argument(
    function: Callable[..., Any], name: str, known: Iterable[str] = ()
) -> InputError:
    """Return the error for an argument that a function does not have.

    Args:
        function: The function that was called.
        name: The argument.
        known: Arguments that its signature does not name.
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    hint = nearest(name, [*named, *known])
    return InputError(f"{function.__name__}() has no argument {name!r}; {hint}")
