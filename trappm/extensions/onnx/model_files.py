"""Tracer of ONNX files for the core, which finds it by the name of this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trappm.prediction.models.tracers import LocalTracer, TracedStep, step_options, traced_step
from trappm.profiler.records import Phase, StepSettings
from trappm.profiler.records.allocations import TRACED_BATCH_SIZES

if TYPE_CHECKING:
    from trappm.profiler.records.trace import StaticProfile, StepProfile

PRELOAD = ("onnx", "trappm.extensions.onnx.file_profile", "trappm.extensions.onnx.model_files")
"""Modules that the warm process imports to trace files."""


@dataclass(frozen=True)
class FileTracer(LocalTracer):
    """Tracer of an ONNX file, in this process: for files that can be trusted."""

    is_file: ClassVar[bool] = True
    is_tokens: bool = False
    """True if the input size is a number of tokens."""

    def profile(self) -> tuple[str, StaticProfile]:
        from trappm.extensions.onnx.file_profile import file_profile

        path = Path(self.model)
        return path.name, file_profile(path, self.input_size, is_tokens=self.is_tokens)

    def step(self, settings: StepSettings, batch_size: int | None) -> StepProfile:
        from trappm.extensions.onnx.file_profile import rebuilt
        from trappm.profiler.static_profile import step_profile

        module, sample, _ = rebuilt(Path(self.model), self.input_size, is_tokens=self.is_tokens)
        batch_sizes = (batch_size, batch_size) if batch_size else TRACED_BATCH_SIZES
        return step_profile(module, sample, step_options(settings), batch_sizes)

    def traced_step(self, settings: StepSettings, phase: Phase, batch_size: int) -> TracedStep:
        from trappm.extensions.onnx.file_profile import rebuilt
        from trappm.profiler.models.on_meta import on_meta

        module, sample, only = rebuilt(Path(self.model), self.input_size, is_tokens=self.is_tokens)
        copied = on_meta(module, None, settings.memory_format, settings.precision)
        why = "the file has this one only; export it with a dynamic batch axis" if only else ""
        return traced_step(copied, sample, step_options(settings), phase, only or batch_size, why)
