"""Importer of published step times on V100, A100 and other cards from three repositories.

`pycls` (facebookresearch/pycls, MIT), `pytorch-gpu-benchmark` (ryujaehun's and lamikr's, MIT) and
`deep-learning-examples` (NVIDIA, BSD and Apache-2.0). Each source times different parts of a step,
recorded as `StepScope`. Only steps of timm models on one GPU (pycls: on each of eight) are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.importers.sheets import (
    SECOND,
    UNTOLD,
    Cells,
    known_input_size,
    number_in,
    published,
    read_rows,
    reject,
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
    member,
)
from trappm.profiler.records.step_scope import KEY, WHOLE_STEP, StepScope
from trappm.store.files import ParsedRow

PRECISIONS = {"fp32": Precision.FP32, "tf32": Precision.FP32, "amp": Precision.AMP_FP16}
"""Precision by its name in the sheets. On an A100, fp32 uses TF32 for convolutions (PyTorch's
default). The sheets' fp64 and `fp16` (`model.half()`) are rejected."""

PHASES = {"infer": Phase.INFER, "train": Phase.TRAIN, "train_fwd_bwd": Phase.TRAIN}
BYTES_PER_PIXEL = 3 * 4


def _copied_bytes(cells: Cells) -> int:
    """Return the bytes of an fp32 image; scripts before 2020 kept the images on the GPU."""
    copied = cells.get("h2d_copy_timed", "") not in ("", "0", "0.0")
    return BYTES_PER_PIXEL * whole_in(cells, "img_size") ** 2 if copied else 0


@dataclass(frozen=True)
class SourceSheet:
    """Columns of one source, and the scope of its times."""

    name: str
    licence: str
    step_ms: str
    batch: str
    protocol: Protocol
    optimizer: Optimizer
    scope: Callable[[Cells], StepScope]
    gpus: str | None = "n_gpus"
    """Column with the number of GPUs that share the work; None where each has its own."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return all columns that are read."""
        needed = ("timm_name", "device", "phase", "precision", "img_size", self.step_ms, self.batch)
        return needed if self.gpus is None else (*needed, self.gpus)


SHEETS = (
    SourceSheet(
        "pycls",
        "MIT",
        "step_ms",
        "per_gpu_batch",
        Protocol(name="pycls", warmup_steps=5, min_steps=50, max_steps=50),
        Optimizer.SGD,
        lambda _: StepScope(updates=False),
        gpus=None,
    ),
    SourceSheet(
        "pytorch-gpu-benchmark",
        "MIT",
        "median_ms",
        "per_gpu_batch",
        Protocol(name="pytorch-gpu-benchmark", warmup_steps=5, min_steps=20, max_steps=50),
        Optimizer.SGD,
        lambda cells: StepScope(updates=False, copied_bytes=_copied_bytes(cells)),
    ),
    SourceSheet(
        "deep-learning-examples",
        "BSD-3-Clause",
        "micro_step_ms_derived",
        "per_gpu_micro_batch",
        Protocol(name="deep-learning-examples", warmup_steps=0, min_steps=1, max_steps=1),
        Optimizer.MOMENTUM,
        lambda _: WHOLE_STEP,
    ),
)
"""DeepLearningExamples' loader copies images while the step before runs."""

SOURCES = tuple(sheet.name for sheet in SHEETS)


def sheet_of(columns: set[str]) -> SourceSheet | None:
    """Return the source whose sheets have such columns, or None."""
    return next((s for s in SHEETS if {*s.columns, "source_path"} <= columns), None)


def parse_rows(path: Path, source: str | None = None) -> list[ParsedRow]:
    """Return each row of a sheet.

    Args:
        path: The sheet.
        source: One of SOURCES (default: the one whose columns it has).

    Raises:
        InputError: The file or a row of it cannot be read, or it is not of such a source.
    """
    columns = {*next(read_rows(path, frozenset(), dict), {})}
    sheet = sheet_of(columns)
    if sheet is None or source not in {None, sheet.name}:
        raise InputError(
            f"{path.name} is not a sheet of {source or ' or '.join(SOURCES)}; it has the columns "
            f"{', '.join(sorted(columns))[:200]}"
        )
    seen: set[tuple[str, str, Configuration]] = set()
    return list(read_rows(path, frozenset(), lambda cells: _parse_row(sheet, cells, seen)))


def _parse_row(
    sheet: SourceSheet, cells: Cells, seen: set[tuple[str, str, Configuration]]
) -> ParsedRow:
    reason = _refusal(sheet, cells)
    if reason is not None:
        return reject(reason)
    phase = PHASES[cells["phase"]]
    memory_format = cells.get("memory_format", "contiguous").replace("_", "-")
    what = Configuration(
        architecture=current_name(cells["timm_name"]),
        batch_size=whole_in(cells, sheet.batch),
        input_size=whole_in(cells, "img_size"),
        precision=PRECISIONS[cells["precision"]],
        memory_format=member("memory_format", MemoryFormat, memory_format),
        optimizer=sheet.optimizer if phase is Phase.TRAIN else Optimizer.SGD,
        phase=phase,
    )
    if known_input_size(what.architecture) is None:
        return reject("timm does not know the architecture")
    environment = _environment(sheet, cells)
    run = environment["device"], environment["run"], what
    if run in seen:
        return SECOND
    seen.add(run)
    step_ms = number_in(cells, sheet.step_ms)
    label = published(what, sheet.protocol, environment, row=str(step_ms), step_time_ms=step_ms)
    return ParsedRow(reason="step time", measurement=label)


def _refusal(sheet: SourceSheet, cells: Cells) -> str | None:
    """Return the reason why a readable row yields no measurement, or None if it yields one."""
    if cells["precision"] not in PRECISIONS:
        return f"unsupported precision {cells['precision'][:80]!r}"
    if cells["phase"] not in PHASES:
        return f"unknown phase {cells['phase'][:80]!r}"
    if not cells["timm_name"]:
        return "timm has no such model"
    if sheet.gpus is not None and cells[sheet.gpus] != "1":
        return "several GPUs share the batch"
    if cells.get("suspect"):
        return "doubtful by the sheet's own word"
    if not all(cells[name] for name in (sheet.batch, sheet.step_ms, "img_size")):
        return "batch size, input size or time is not told"
    return None


def _environment(sheet: SourceSheet, cells: Cells) -> dict[str, Any]:
    """Return device, software and scope of a row."""
    words = cells["device"].lower().split()
    versions = {
        "torch": cells.get("torch")
        or cells.get("container")
        or cells.get("framework", "").removeprefix("pytorch-"),
        "cuda": cells.get("cuda"),
        "cudnn": cells.get("cudnn"),
    }
    return {
        "device": "-".join(words),
        "device_name": cells["device"],
        "source": sheet.name,
        "licence": sheet.licence,
        "run": " ".join(
            cells[name] for name in ("run_tag", "script", "date", "system") if cells.get(name)
        ),
        KEY: sheet.scope(cells).to_dict(),
        **{name: version for name, version in versions.items() if version},
        "untold": {name: UNTOLD for name, value in versions.items() if not value},
    }
