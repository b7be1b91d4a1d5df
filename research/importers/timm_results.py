"""Importer of timm's published benchmark results: step times on consumer GPUs with AMP.

A sheet has one row per model, at the largest batch size that fits. The settings are only in the
file name, as in `benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv`; STACKS has the versions of
sheets without versions in their name. AMP is autocast to fp16, and the optimizer is SGD with a
momentum of 0.9, the defaults of timm's `benchmark.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from research.importers.sheets import (
    SECOND,
    Cells,
    known_input_size,
    number_in,
    published,
    read_rows,
    reject,
    text_in,
    whole_in,
)
from trappm.profiler.errors import InputError
from trappm.profiler.models.zoo import current_name
from trappm.profiler.records import (
    Configuration,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    Protocol,
)
from trappm.store.files import ParsedRow

DEVICES = {"rtx3090": "NVIDIA GeForce RTX 3090", "rtx4090": "NVIDIA GeForce RTX 4090"}
STACKS = {
    ("rtx3090", Phase.TRAIN): ("1.12", "11.3"),
    ("rtx3090", Phase.INFER): ("2.4", "12.4"),
    ("rtx4090", Phase.INFER): ("2.4", "12.4"),
}
"""PyTorch and CUDA of the known sheets."""
MEMORY_FORMATS = {"nchw": MemoryFormat.CONTIGUOUS, "nhwc": MemoryFormat.CHANNELS_LAST}
PROTOCOL = Protocol(name="timm-benchmark", warmup_steps=10, min_steps=40, max_steps=40)
"""The defaults of timm's `benchmark.py`."""
AGREE = 0.25
"""Largest relative difference of step time and throughput, which includes creating images."""


def parse_rows(path: Path, *, named_like: Path | None = None) -> list[ParsedRow]:
    """Return each row of a sheet.

    Args:
        path: The sheet.
        named_like: Another sheet, whose name is read where that of `path` does not tell.

    Raises:
        InputError: The file name lacks the settings, or the file cannot be read.
    """
    try:
        phase, memory_format, environment = _named(path)
    except InputError:
        if named_like is None:
            raise
        phase, memory_format, environment = _named(named_like)
    step, rate, batch, size = (
        f"{phase}_{name}" for name in ("step_time", "samples_per_sec", "batch_size", "img_size")
    )
    seen: set[Configuration] = set()

    def parse_row(cells: Cells) -> ParsedRow:
        step_ms, per_s = number_in(cells, step), number_in(cells, rate)
        what = Configuration(
            architecture=current_name(text_in(cells, "model")),
            batch_size=whole_in(cells, batch),
            input_size=whole_in(cells, size),
            precision=Precision.AMP_FP16,
            memory_format=memory_format,
            optimizer=Optimizer.MOMENTUM if phase is Phase.TRAIN else Optimizer.SGD,
            phase=phase,
        )
        if known_input_size(what.architecture) is None:
            return reject("timm does not know the architecture or its input size")
        if what in seen:
            return SECOND
        if abs(step_ms / (1000 * what.batch_size / per_s) - 1) > AGREE:
            return reject("step time and throughput contradict each other")
        seen.add(what)
        label = published(what, PROTOCOL, environment, row=str(step_ms), step_time_ms=step_ms)
        return ParsedRow(reason="step time", measurement=label)

    return list(read_rows(path, {"model", step, rate, batch, size}, parse_row))


def _named(path: Path) -> tuple[Phase, MemoryFormat, dict[str, Any]]:
    """Return phase, memory format and environment by a file's name."""
    words = set(re.split(r"[-_.]", path.name.lower()))
    device = words & DEVICES.keys()
    phases = words & {*Phase}
    formats = words & MEMORY_FORMATS.keys()
    if not (len(device) == len(phases) == len(formats) == 1 and "amp" in words):
        raise InputError(
            f"the settings are missing in the file name {path.name}; use a name such as "
            "benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv"
        )
    key, phase = device.pop(), Phase(phases.pop())
    versions = (_version(words, "pt"), _version(words, "cu"))
    torch, cuda = (
        given or known
        for given, known in zip(versions, STACKS.get((key, phase), (None, None)), strict=True)
    )
    if torch is None or cuda is None:
        raise InputError(f"the name {path.name} has no versions; add them, such as pt112-cu113")
    environment = {
        "device": key,
        "device_name": DEVICES[key],
        "torch": torch,
        "cuda": cuda,
        "source": "timm, published benchmark results",
    }
    return phase, MEMORY_FORMATS[formats.pop()], environment


def _version(words: set[str], kind: str) -> str | None:
    """Return a version among words: `pt112` is PyTorch 1.12, `pt240` 2.4; `cu113` is CUDA 11.3."""
    matches = [m for word in words if (m := re.fullmatch(rf"{kind}([0-9]{{3}})", word))]
    if not matches:
        return None
    digits = matches[0][1]
    if kind == "cu":
        return f"{digits[:2]}.{digits[2]}"
    return f"1.{digits[1:]}" if digits[0] == "1" else f"{digits[0]}.{digits[1]}"
