"""Steps that others timed on V100, A100 and other cards: sheets of three repositories.

`pycls` (facebookresearch/pycls, MIT), `pytorch-gpu-benchmark` (ryujaehun's and lamikr's, MIT) and
`deep-learning-examples` (NVIDIA, BSD and Apache-2.0). Each times something else, which `StepScope`
says. Only steps of models that timm has, on one GPU (pycls: on each of eight), are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.importers.sheets import (
    current_name,
    known_input_size,
    number_in,
    published,
    read_cells,
    whole_in,
)
from trappm.profiler.errors import InputError
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
from trappm.store.exchange.files import Verdict

Cells = Mapping[str, str]

PRECISIONS = {"fp32": Precision.FP32, "tf32": Precision.FP32, "amp": Precision.AMP_FP16}
"""Of pytorch-gpu-benchmark and NVIDIA; on an A100 fp32 lets convolutions take TF32, as PyTorch does
by default. `fp16` is `model.half()` and fp64 is no step that TraPPM runs: both are rejected."""


PHASES = {"infer": Phase.INFER, "train": Phase.TRAIN, "train_fwd_bwd": Phase.TRAIN}
BYTES_PER_PIXEL = 3 * 4


def _copied_bytes(cells: Cells) -> int:
    """Of an image in fp32, by the scripts of 2020 and later; those before had them on the GPU."""
    copied = cells.get("h2d_copy_timed", "") not in ("", "0", "0.0")
    return BYTES_PER_PIXEL * whole_in("img_size", cells["img_size"]) ** 2 if copied else 0


@dataclass(frozen=True)
class Sheet:
    """The columns of one source, and what it times."""

    name: str
    licence: str
    step_ms: str
    batch: str
    protocol: Protocol
    optimizer: Optimizer
    scope: Callable[[Cells], StepScope]
    gpus: str | None = "n_gpus"
    """The column with the number of GPUs that share the work; None where each has its own."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All that are read."""
        needed = ("timm_name", "device", "phase", "precision", "img_size", self.step_ms, self.batch)
        return needed if self.gpus is None else (*needed, self.gpus)


SHEETS = (
    Sheet(
        "pycls",
        "MIT",
        "step_ms",
        "per_gpu_batch",
        Protocol(name="pycls", warmup_steps=5, min_steps=50, max_steps=50),
        Optimizer.SGD,
        lambda _: StepScope(updates=False),
        gpus=None,
    ),
    Sheet(
        "pytorch-gpu-benchmark",
        "MIT",
        "median_ms",
        "per_gpu_batch",
        Protocol(name="pytorch-gpu-benchmark", warmup_steps=5, min_steps=20, max_steps=50),
        Optimizer.SGD,
        lambda cells: StepScope(updates=False, copied_bytes=_copied_bytes(cells)),
    ),
    Sheet(
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


def sheet_of(columns: set[str]) -> Sheet | None:
    """The source whose sheets have such columns; None if none has."""
    return next((s for s in SHEETS if {*s.columns, "source_path"} <= columns), None)


def verdicts(path: Path, source: str | None = None) -> list[Verdict]:
    """What becomes of each row of a sheet.

    Args:
        path: of the sheet.
        source: one of SOURCES; by default the one whose columns it has.

    Raises:
        InputError: the file or a row of it cannot be read, or it is of no such source.
    """
    rows = list(read_cells(path))
    columns = {*rows[0][1]} if rows else set()
    sheet = sheet_of(columns)
    if sheet is None or source not in {None, sheet.name}:
        raise InputError(
            f"{path.name} is no sheet of {source or ' or '.join(SOURCES)}; it has the columns "
            f"{', '.join(sorted(columns))[:200]}"
        )
    result = []
    seen: set[tuple[str, str, Configuration]] = set()
    for line, cells in rows:
        try:
            result.append(_verdict(sheet, cells, seen))
        except InputError as error:
            raise InputError(f"{path.name}, line {line}: {error}; nothing was imported") from error
    return result


def _verdict(sheet: Sheet, cells: Cells, seen: set[tuple[str, str, Configuration]]) -> Verdict:
    reason = _refusal(sheet, cells)
    if reason is not None:
        return Verdict(kind="rejected", reason=reason)
    phase = PHASES[cells["phase"]]
    what = Configuration(
        architecture=current_name(cells["timm_name"]),
        batch_size=whole_in(sheet.batch, cells[sheet.batch]),
        input_size=whole_in("img_size", cells["img_size"]),
        precision=PRECISIONS[cells["precision"]],
        memory_format=member(
            "memory_format",
            MemoryFormat,
            cells.get("memory_format", "contiguous").replace("_", "-"),
        ),
        optimizer=sheet.optimizer if phase is Phase.TRAIN else Optimizer.SGD,
        phase=phase,
    )
    if known_input_size(what.architecture) is None:
        return Verdict(kind="rejected", reason="timm does not know the architecture")
    environment = _environment(sheet, cells)
    run = environment["device"], environment["run"], what
    if run in seen:
        return Verdict(kind="rejected", reason="a second row for the same run")
    seen.add(run)
    step_ms = number_in(sheet.step_ms, cells[sheet.step_ms])
    measurement = published(
        what, sheet.protocol, environment, row=str(step_ms), step_time_ms=step_ms
    )
    return Verdict(kind="imported", reason="step time", measurement=measurement)


def _refusal(sheet: Sheet, cells: Cells) -> str | None:
    """Why nothing is made of a row that can be read; None if something is."""
    if cells["precision"] not in PRECISIONS:
        return f"{cells['precision'][:80]!r} is no precision that steps are run in"
    if cells["phase"] not in PHASES:
        return f"{cells['phase'][:80]!r} is no phase of a step"
    if not cells["timm_name"]:
        return "timm has no such model"
    if sheet.gpus is not None and cells[sheet.gpus] != "1":
        return "several GPUs share the batch"
    if cells.get("suspect"):
        return "doubtful by the sheet's own word"
    if not all(cells[name] for name in (sheet.batch, sheet.step_ms, "img_size")):
        return "batch size, input size or time is not told"
    return None


def _environment(sheet: Sheet, cells: Cells) -> dict[str, Any]:
    """Where and how a row was measured, as far as it tells."""
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
        "untold": {name: "not told by the source" for name, value in versions.items() if not value},
    }
