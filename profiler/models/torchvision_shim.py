"""Makes torchvision, and so timm, importable with a torch without CUDA.

The torchvision on PyPI has an extension built with CUDA. If it cannot be loaded, `import
torchvision` raises "operator torchvision::nms does not exist". No image classifier calls these
operators, so declaring their schemas is enough. TraPPM does so before it imports timm; `python -m
trappm.profiler.models.torchvision_shim` makes every Python of an environment do so (`make install`
calls it).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# A torch Library withdraws its operators when it is collected, so it is kept here.
_library: torch.library.Library | None = None


def register_missing_operators() -> None:
    """Declare torchvision's operators if its own extension cannot be loaded.

    Call before the first `import timm` or `import torchvision`; further calls have no effect.
    """
    import torch

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


STARTUP = "trappm_torchvision"
"""Module that runs when Python starts, and waits for an import of torchvision."""
_WAITING = '''"""Written by TraPPM: torchvision's operators cannot be loaded with this torch."""

import sys


class BeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            try:
                from trappm.profiler.models.torchvision_shim import register_missing_operators
            except ImportError:  # trappm was uninstalled
                return
            register_missing_operators()


sys.meta_path.insert(0, BeforeTorchvision())
'''


def mend(folder: Path) -> bool:
    """Make every later Python of an environment declare the operators if needed; return whether.

    Args:
        folder: The environment's packages.
    """
    with contextlib.suppress(ImportError):
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            (folder / f"{STARTUP}.py").write_text(_WAITING)
            (folder / f"{STARTUP}.pth").write_text(f"import {STARTUP}\n")
            return True
    return False


if __name__ == "__main__":
    mend(Path(sysconfig.get_path("purelib")))
