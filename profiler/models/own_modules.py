"""Modules of users by name: `package.module:function`, as a `ModelSource`.

The function returns an `nn.Module` for square RGB images. It gets the pixels if it has an argument
`input_size`. A name ends with the version of the package, as in `shop.vision:tagger@1.2`, since two
versions are two models. Reading a name and its version runs no code of the package.
`import_package` runs it; campaigns call that on their workers only.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from trappm.profiler.errors import (
    InputError,
    MissingLibraryError,
    TrappmError,
    UnknownArchitectureError,
    nearest,
    one_line,
)
from trappm.profiler.host.environment import hash_of_modules

if TYPE_CHECKING:
    from torch import nn

    from trappm.profiler.models.model_input import Sample

MAX_NAME = 200
"""Longest name that the label store takes."""
_WORD = r"[^\W\d]\w*"
_NAME = re.compile(rf"({_WORD}(?:\.{_WORD})+):({_WORD})(?:@([\w.!+-]+))?")


class OwnName(NamedTuple):
    """Parts of the name of a user's module."""

    module: str
    """Module of Python, such as `shop.vision`."""
    function: str
    version: str
    """Version of the package, or the installed one if the name had none."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a name of `is_own_module`.

        Raises:
            MissingLibraryError: It has no version, and the package is not installed here.
            InputError: It is longer than `MAX_NAME`.
        """
        match = _NAME.fullmatch(text)
        assert match is not None, text  # noqa: S101
        module, function, version = match.groups()
        name = cls(module, function, version or installed_version(module.partition(".")[0], text))
        if len(str(name)) > MAX_NAME:
            raise InputError(f"{str(name)[:40]}... has more than {MAX_NAME} characters")
        return name

    def __str__(self) -> str:
        return f"{self.module}:{self.function}@{self.version}"


def is_own_module(architecture: str) -> bool:
    """Return whether this has the form `package.module:function`, with or without a version."""
    return _NAME.fullmatch(architecture) is not None


def with_version(architecture: str) -> str:
    """Return the name of a user's module with its version, and other names as they are.

    Raises:
        MissingLibraryError, InputError: As `OwnName.parse`.
    """
    return str(OwnName.parse(architecture)) if is_own_module(architecture) else architecture


def without_version(architecture: str) -> str:
    """Return the name of a user's module without its version."""
    return architecture.partition("@")[0]


def installed_version(package: str, name: str) -> str:
    """Return the version of a package on this machine, which is not imported.

    It is that of the installed distribution. An editable or loose package may change at any time,
    so a hash of its source files is appended: `0.1+5f0c6a1d2b3e`.

    Args:
        package: First part of a module's name.
        name: Name of the model in messages.

    Raises:
        MissingLibraryError: There is no such package here.
    """
    version = _version_of(package)
    if version is None:
        raise MissingLibraryError(
            f"{name}: there is no package {package!r} here; install it or add its folder to "
            f"PYTHONPATH, or give its version, as in {name}@1.0"
        )
    return version


@cache  # the imported code of a process does not change either
def _version_of(package: str) -> str | None:
    try:
        spec = find_spec(package)
    except ValueError:  # __main__
        spec = None
    if spec is None:
        return None
    version = "0"
    for name in dict.fromkeys((package, *metadata.packages_distributions().get(package, ()))):
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        version = distribution.version
        if f"\n{package}/" in f"\n{distribution.read_text('RECORD') or ''}":
            return version
    folders = sorted(map(Path, spec.submodule_search_locations or ()))
    digest = "".join(hash_of_modules(folder)[:12] for folder in folders)[:24]
    return f"{version}{'.' if '+' in version else '+'}{digest}"


def import_package(architecture: str) -> None:
    """Import the module that a name is of.

    Raises:
        MissingLibraryError, UnknownArchitectureError: As `create_model`.
    """
    _function_of(OwnName.parse(architecture))


def architectures(patterns: Iterable[str]) -> list[str]:
    """Return the names with their versions, sorted; raises as `with_version`."""
    return sorted(set(map(with_version, patterns)))


check = with_version


def native_input_size(_architecture: str) -> int | None:
    """Return None: the module is made for the size that it is asked for."""
    return None


def input_size_of(architecture: str, input_size: int | None) -> int:
    """Return the given size; raises InputError if there is none."""
    if input_size is None:
        raise InputError(f"{architecture} has no input size of its own; give one, such as 224")
    return input_size


def create_model(architecture: str, input_size: int) -> nn.Module:
    """Return the module that the named function makes, with the weights that it gives it.

    Raises:
        MissingLibraryError: The package is missing here, has another version, or its import fails.
        UnknownArchitectureError: The module has no such function.
        InputError: The function returns something else.
        TrappmError: The function fails, or needs more arguments.
    """
    from torch import nn

    function = _function_of(OwnName.parse(architecture))
    try:
        takes_size = "input_size" in inspect.signature(function).parameters
        made = function(input_size=input_size) if takes_size else function()
    except (Exception, SystemExit) as error:  # perhaps for want of a file, which may be there later
        reason = f"{without_version(architecture)} failed: {type(error).__name__}: "
        raise TrappmError(reason + one_line(error)) from error
    if not isinstance(made, nn.Module):
        raise InputError(
            f"{without_version(architecture)} returns a {type(made).__name__}; it must return an "
            "nn.Module"
        )
    return made


def inputs(_architecture: str, input_size: int) -> Sample:
    from trappm.profiler.models.model_input import Sample

    return Sample.of(input_size)


def _function_of(name: OwnName) -> Callable[..., Any]:
    package, text = name.module.partition(".")[0], f"{name.module}:{name.function}"
    here = installed_version(package, text)
    if here != name.version:
        raise MissingLibraryError(
            f"{text}: {package} has version {here} here, not {name.version}; install that version, "
            "or measure this one as another model"
        )
    try:
        module = import_module(name.module)
    except (Exception, SystemExit) as error:  # a package's code may raise anything
        raise MissingLibraryError(
            f"{text}: the import of {name.module} failed: {type(error).__name__}: {one_line(error)}"
        ) from error
    function = getattr(module, name.function, None)
    if not callable(function):
        hint = nearest(name.function, vars(module), otherwise="name one of its functions")
        raise UnknownArchitectureError(f"{name.module} has no function {name.function!r}; {hint}")
    return function  # type: ignore[no-any-return]
