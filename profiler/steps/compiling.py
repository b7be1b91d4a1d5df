"""A model under `torch.compile` in the measuring child: cold caches, errors, and facts of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trappm.profiler.errors import UnsupportedModelError, one_line


def use_empty_cache(folder: Path) -> None:
    """Let the compilers of this process use an empty folder, so that compile times are cold."""
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ.pop("TRITON_CACHE_DIR", None)  # by default inside the other


@contextmanager
def compiler_errors() -> Iterator[None]:
    """Turn errors of the compilers in the block, which would come again, into one of one line.

    Raises:
        UnsupportedModelError: Dynamo, inductor, Triton or the C++ compiler failed.
    """
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        cause = getattr(error, "inner_exception", error)
        what = f"{type(cause).__name__}: {one_line(cause)}"
        raise UnsupportedModelError(f"torch.compile fails: {what}") from error


def compile_facts() -> dict[str, int]:
    """Return the graph breaks of this process, and how often a frame was compiled again."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    return {
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompilations": sum(count - 1 for count in FRAME_COMPILE_COUNTER.values() if count),
    }
