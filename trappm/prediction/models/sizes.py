"""Which size of input a question means: pixels of images, or tokens of text."""

from __future__ import annotations

from trappm.profiler.errors import InputError
from trappm.profiler.models.known_names import is_prefixed, unit_of
from trappm.profiler.records import MAX_SIZE


def size_kind(model: object) -> str:
    """`tokens` of a transformer by its name; `px` of all else."""
    return unit_of(model) if isinstance(model, str) and is_prefixed(model) else "px"


def size_of(model: object, input_size: int | None, sequence_length: int | None) -> int | None:
    """The one of the two that is for such a model; None if its default is meant.

    Raises:
        InputError: the other one is given, or an unknown transformer.
    """
    if size_kind(model) == "tokens":
        if input_size is not None:
            raise InputError(
                f"{model} takes tokens; give a sequence length, not the input size {input_size}"
            )
        return sequence_length
    if sequence_length is not None:
        raise InputError(
            f"{model if isinstance(model, str) else type(model).__name__} takes no tokens; give an "
            f"input size, not the sequence length {sequence_length}"
        )
    return input_size


def check_size(name: str, value: object) -> None:
    """Raises InputError: neither None nor a size that a batch or an image can have."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise InputError(f"{name} is {value!r}; it must be a whole number from 1 to {MAX_SIZE:,}")
