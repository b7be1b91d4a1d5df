"""Makes torchvision, and so timm, importable with a torch without CUDA.

The torchvision on PyPI has an extension built with CUDA. If it cannot be loaded, `import
torchvision` raises "operator torchvision::nms does not exist". No image classifier calls these
operators, so declaring their schemas is enough. `import trappm` adds a finder to this process, by
which they are declared when torchvision is imported, and not before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# A torch Library withdraws its operators when it is collected, so it is kept here.
_library: torch.library.Library | None = None


class _Declaring(Loader):
    """Loader of torchvision that declares missing operators before its code runs."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        _declare_missing_operators(module.__spec__)
        self._loader.exec_module(module)


class _TorchvisionFinder(MetaPathFinder):
    """Finder of torchvision that the others find, with a loader of its own."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Declaring(spec.loader)
        return spec


def prepare_torchvision() -> None:
    """Have torchvision's operators declared when it is imported in this process."""
    is_waiting = any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path)
    if "torchvision" not in sys.modules and not is_waiting:
        sys.meta_path.insert(0, _TorchvisionFinder())


def _declare_missing_operators(spec: ModuleSpec | None) -> None:
    """Declare torchvision's operators if its own extension cannot be loaded."""
    import torch

    global _library  # noqa: PLW0603
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
