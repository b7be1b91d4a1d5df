"""Lets torchvision, and so timm, be imported beside a torch without CUDA.

The torchvision on PyPI carries an extension built against CUDA. Where that cannot be loaded, its
operators are unknown and `import torchvision` raises "operator torchvision::nms does not exist".
No image classifier calls them; declaring their schemas is enough for the import.
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# A torch Library withdraws its operators when it is collected, so it is kept here.
_library: torch.library.Library | None = None


def register_missing_operators() -> None:
    """Declares torchvision's operators where its own extension cannot; otherwise does nothing.

    To be called before the first `import timm` or `import torchvision` of a process; calling it
    again is harmless.
    """
    global _library  # noqa: PLW0603
    spec = importlib.util.find_spec("torchvision")
    if _library is not None or spec is None or spec.origin is None:
        return
    for extension in sorted(Path(spec.origin).parent.glob("_C*")):
        with contextlib.suppress(OSError, ImportError):
            torch.ops.load_library(str(extension))  # type: ignore[no-untyped-call]
    missing = [s for s in _SCHEMAS if not hasattr(torch.ops.torchvision, s.partition("(")[0])]
    if missing:
        _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in missing:
            _library.define(schema)  # type: ignore[no-untyped-call]
