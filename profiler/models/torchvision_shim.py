"""Makes torchvision, and so timm, importable with a torch without CUDA.

The torchvision on PyPI has an extension built with CUDA. If it cannot be loaded, `import
torchvision` raises "operator torchvision::nms does not exist". No image classifier calls these
operators, so declaring their schemas is enough. `import trappm` adds a finder to this process that
declares them when torchvision is imported; it writes no file and imports nothing before that.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# A torch Library withdraws its operators when it is collected, so it is kept here.
_library: torch.library.Library | None = None


class _BeforeTorchvision(MetaPathFinder):
    """Finder that finds nothing, but declares the operators before torchvision is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare_missing_operators()


def prepare_torchvision() -> None:
    """Have torchvision's operators declared when it is imported in this process."""
    is_waiting = any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path)
    if "torchvision" not in sys.modules and not is_waiting:
        sys.meta_path.insert(0, _BeforeTorchvision())


def _declare_missing_operators() -> None:
    """Declare torchvision's operators if its own extension cannot be loaded."""
    import torch

    global _library  # noqa: PLW0603
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for extension in sorted(Path(spec.origin).parent.glob("_C*")):
        with contextlib.suppress(OSError, ImportError):
            torch.ops.load_library(str(extension))  # type: ignore[no-untyped-call]
    missing = [s for s in _SCHEMAS if not hasattr(torch.ops.torchvision, s.partition("(")[0])]
    if missing and _library is None:
        _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in missing:
            _library.define(schema)  # type: ignore[no-untyped-call]
