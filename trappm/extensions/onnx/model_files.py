"""Tracer of ONNX files for the core, which finds it by the name of this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trappm.prediction.models import LocalTracer
from trappm.profiler.records import Phase
from trappm.profiler.traced_step import Trace, TraceSettings

PRELOAD = ("onnx", "trappm.extensions.onnx.file_trace", "trappm.extensions.onnx.model_files")
"""Modules that the warm process imports to trace files."""


@dataclass(frozen=True)
class FileTracer(LocalTracer):
    """Tracer of an ONNX file, in this process: for files that can be trusted."""

    is_file: ClassVar[bool] = True
    is_tokens: bool = False
    """True if the input size is a number of tokens."""

    def trace(
        self, settings: TraceSettings, phase: Phase, batch_size: int | None, with_origins: bool
    ) -> Trace:
        from trappm.extensions.onnx.file_trace import file_trace

        return file_trace(
            Path(self.model),
            self.input_size,
            settings,
            phase,
            is_tokens=self.is_tokens,
            batch_size=batch_size,
            with_origins=with_origins,
        )
