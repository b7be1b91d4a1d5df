"""Table of docs/research/foreign_modules.md: predicted memory of third-party modules.

Memory is that of an A100 at batch 32 without CUDA's context and libraries. The checks of each value
are in tests/profiler/tracing/test_foreign_modules.py.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

import trappm
from research.data import ROOT
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.simulation.memory_breakdown import Part

BATCH_SIZE = 32


def answer(foreign: Any) -> str:
    """Return the memory of the training step, or the reason why it is missing."""
    args, kwargs = foreign.call(BATCH_SIZE)
    module = foreign.build()
    names = inspect.signature(module.forward).parameters
    inputs = {**dict(zip(names, args, strict=False)), **kwargs}
    options = {"precision": "fp32", "optimizer": "sgd", **foreign.estimate}
    try:
        answer = trappm.predict(
            module, example_input=inputs, loss=foreign.loss, device="a100", **options
        )
        parts = answer.memory_breakdown.parts_mib
    except UnsupportedModelError as refusal:
        return f"`{refusal}`"
    step_mib = sum(size for part, size in parts.items() if part is not Part.CONTEXT)
    only = "; this batch only" if "batch" in answer.missing.get("largest_batch", "") else ""
    return f"{step_mib:,.0f} MiB{only}"


def checked(foreign: Any) -> str:
    """Return the quantities compared with a real step."""
    if foreign.refusal:
        return "operator and line"
    if foreign.is_random:
        return "that there is an answer"
    kept = f"kept bytes not: {foreign.cpu_differs}" if foreign.cpu_differs else "kept bytes"
    flops = "FLOPs of the forward pass" if "mobilenet" in foreign.name else "FLOPs"
    unlike = foreign.cpu_differs or foreign.peak_differs or foreign.has_fused_attention
    return ", ".join([flops, *([] if unlike else ["peak of live bytes"]), kept])


def main() -> None:
    """Print the table."""
    sys.path.append(str(ROOT / "tests/profiler/tracing"))
    from foreign_modules import MODULES, NO_TRANSFORMERS, TRANSFORMERS

    warnings.simplefilter("ignore")
    print("| module | training step at batch 32 | checked against a real step |")
    print("|---|---|---|")
    for foreign in MODULES:
        if "Hugging Face" in foreign.name and not TRANSFORMERS:
            print(f"| {foreign.name} | {NO_TRANSFORMERS} | |")
            continue
        print(f"| {foreign.name} | {answer(foreign)} | {checked(foreign)} |", flush=True)
