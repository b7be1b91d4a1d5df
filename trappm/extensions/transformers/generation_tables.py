"""What generating costs, on the terminal: the answer, then times and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trappm.prediction.fitting import room_text
from trappm.terminal.tables import console, print_line, print_notes, table

if TYPE_CHECKING:
    from trappm.extensions.transformers.generation import Generation, Interval

_GIB = 1024.0


def print_generation(made: Generation, *, explain: bool = False) -> None:
    """The answer in a sentence; then times with their intervals, and what memory is made of."""
    print_line(_answer(made))
    times = [_time("first token", made.first_token_ms, made.first_token_interval_ms)]
    if made.tokens > 1:
        times.append(_time("each later token", made.token_ms, made.token_interval_ms))
        times.append(("  with CUDA graphs", f"{made.token_device_ms:,.1f}", ""))
    memory = {
        "weights": made.weights_mib,
        "cache at the end": made.cache_mib,
        "activations and gaps": made.activations_mib,
        "CUDA's context": made.context_mib,
    }
    out = console()
    out.print(table("", ("time", "ms", "90 % interval"), times))
    out.print(table("", ("memory", "GiB"), [(k, f"{v / _GIB:,.2f}") for k, v in memory.items()]))
    print_notes(made.remarks, explain=explain)


def _answer(made: Generation) -> str:
    many = f"{made.batch_size:,} prompts" if made.batch_size > 1 else "a prompt"
    room = room_text(made.verdict, made.device_name, made.memory, made.capacity_mib)
    return (
        f"{room}. {made.model} reads {many} of {made.prompt:,} tokens and writes {made.tokens:,} "
        f"in {made.total_s:.3g} s in {made.precision}, {made.tokens_per_s:,.0f} tokens per second."
    )


def _time(what: str, median_ms: float, interval_ms: Interval) -> tuple[str, str, str]:
    low, high = interval_ms
    return what, f"{median_ms:,.1f}", f"{low:,.1f} to {high:,.1f}"
