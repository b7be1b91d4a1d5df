"""timm's published benchmark results: step times of its models on consumer GPUs, with AMP.

A sheet has one row a model, at the batch size that fitted. What was measured stands in the name of
the file alone, as in `benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv`; a name without versions
means those of the sheets that are known here. AMP is autocast to fp16, and the optimizer is SGD
with a momentum of 0.9, the defaults of timm's `benchmark.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from research.importers.sheets import (
    current_name,
    known_input_size,
    published,
    read_sheet,
)
from trappm.profiler.errors import InputError
from trappm.profiler.records import (
    Configuration,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    Protocol,
)
from trappm.store.exchange.files import Verdict

DEVICES = {"rtx3090": "NVIDIA GeForce RTX 3090", "rtx4090": "NVIDIA GeForce RTX 4090"}
STACKS = {
    ("rtx3090", Phase.TRAIN): ("1.12", "11.3"),
    ("rtx3090", Phase.INFER): ("2.4", "12.4"),
    ("rtx4090", Phase.INFER): ("2.4", "12.4"),
}
"""PyTorch and CUDA of the sheets that are known."""
MEMORY_FORMATS = {"nchw": MemoryFormat.CONTIGUOUS, "nhwc": MemoryFormat.CHANNELS_LAST}
PROTOCOL = Protocol(name="timm-benchmark", warmup_steps=10, min_steps=40, max_steps=40)
"""The defaults of timm's `benchmark.py`."""
AGREE = 0.25
"""Step time and throughput of a row may differ so much: the latter includes making the images."""


def verdicts(path: Path, *, named_like: Path | None = None) -> list[Verdict]:
    """What becomes of each row of a sheet.

    Args:
        path: of the sheet.
        named_like: another sheet, whose name holds it where that of `path` does not.

    Raises:
        InputError: no name says what was measured, or the file cannot be read.
    """
    try:
        phase, memory_format, environment = _named(path)
    except InputError:
        if named_like is None:
            raise
        phase, memory_format, environment = _named(named_like)
    step, rate, batch, size = (
        f"{phase}_{what}" for what in ("step_time", "samples_per_sec", "batch_size", "img_size")
    )
    result = []
    seen = set()
    for row in read_sheet(path, ("model",), (batch, size), (step, rate)):
        architecture = current_name(row["model"])
        workload = Configuration(
            architecture=architecture,
            batch_size=row[batch],
            input_size=row[size],
            precision=Precision.AMP_FP16,
            memory_format=memory_format,
            optimizer=Optimizer.MOMENTUM if phase is Phase.TRAIN else Optimizer.SGD,
            phase=phase,
        )
        expected_ms = 1000 * row[batch] / row[rate]
        if known_input_size(architecture) is None:
            reason = "timm does not know the architecture or its input size"
            result.append(Verdict(kind="rejected", reason=reason))
        elif workload in seen:
            result.append(Verdict(kind="rejected", reason="a second row for the same run"))
        elif abs(row[step] / expected_ms - 1) > AGREE:
            reason = "step time and throughput contradict each other"
            result.append(Verdict(kind="rejected", reason=reason))
        else:
            seen.add(workload)
            measurement = published(
                workload, PROTOCOL, environment, row=str(row[step]), step_time_ms=row[step]
            )
            verdict = Verdict(kind="imported", reason="step time", measurement=measurement)
            result.append(verdict)
    return result


def _named(path: Path) -> tuple[Phase, MemoryFormat, dict[str, Any]]:
    """What is in a file's name: phase, memory format and environment."""
    words = set(re.split(r"[-_.]", path.name.lower()))
    device = words & DEVICES.keys()
    phases = words & {*Phase}
    formats = words & MEMORY_FORMATS.keys()
    if not (len(device) == len(phases) == len(formats) == 1 and "amp" in words):
        raise InputError(
            f"{path.name} does not tell what was measured; name it as timm does, such as "
            "benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv"
        )
    key, phase = device.pop(), Phase(phases.pop())
    versions = (_version(words, "pt"), _version(words, "cu"))
    torch, cuda = (
        given or known
        for given, known in zip(versions, STACKS.get((key, phase), (None, None)), strict=True)
    )
    if torch is None or cuda is None:
        raise InputError(f"{path.name} tells no versions; add them, such as pt112-cu113")
    environment = {
        "device": key,
        "device_name": DEVICES[key],
        "torch": torch,
        "cuda": cuda,
        "source": "timm, published benchmark results",
    }
    return phase, MEMORY_FORMATS[formats.pop()], environment


def _version(words: set[str], kind: str) -> str | None:
    """PyTorch `pt112` is 1.12, `pt240` is 2.4; CUDA `cu113` is 11.3."""
    matches = [m for word in words if (m := re.fullmatch(rf"{kind}([0-9]{{3}})", word))]
    if not matches:
        return None
    digits = matches[0][1]
    if kind == "cu":
        return f"{digits[:2]}.{digits[2]}"
    return f"1.{digits[1:]}" if digits[0] == "1" else f"{digits[0]}.{digits[1]}"
