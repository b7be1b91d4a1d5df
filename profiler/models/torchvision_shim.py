"""Makes torchvision, and so timm, importable with a torch without CUDA.

The torchvision on PyPI has an extension built with CUDA. If it cannot be loaded, `import
torchvision` raises "operator torchvision::nms does not exist". No image classifier calls these
operators, and the tracer has rules for them, so declaring their schemas is enough. Two of them
have kernels for steps that depend on values, such as detectors. `import trappm` adds a finder to
this process, by which they are declared when torchvision is imported, and not before.
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

_POOL = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SHAPE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_WINDOW = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, "
    "SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask"
)
_CONVOLVED = "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_POOL}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_POOL}, {_SHAPE}, int sampling_ratio, "
    "bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {_POOL}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_POOL}, {_SHAPE}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_POOL}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOL}, "
    f"int sampling_ratio, {_SHAPE}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {_POOL}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOL}, {_SHAPE}) "
    "-> Tensor",
    f"deform_conv2d({_CONVOLVED}, {_WINDOW}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_CONVOLVED}, {_WINDOW}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
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
            name = schema.partition("(")[0]
            if name in _KERNELS:
                _library.impl(name, _KERNELS[name], "CPU")  # type: ignore[no-untyped-call]


def _nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the places of the boxes that no box of a higher score overlaps, best first."""
    order = scores.argsort(descending=True, stable=True)
    left, top, right, bottom = boxes[order].unbind(1)
    areas = (right - left) * (bottom - top)
    is_kept = order >= 0
    for place in range(len(order)):
        if is_kept[place]:
            after = slice(place + 1, None)
            width = right[after].clamp(max=right[place]) - left[after].clamp(min=left[place])
            height = bottom[after].clamp(max=bottom[place]) - top[after].clamp(min=top[place])
            common = width.clamp(min=0) * height.clamp(min=0)
            is_kept[after] &= common <= threshold * (areas[after] + areas[place] - common)
    return order[is_kept]


def _roi_align(
    images: torch.Tensor, regions: torch.Tensor, scale: float, height: int, width: int, *_: Any
) -> torch.Tensor:
    """Return the pixel in the middle of each bin, not the mean of several of them."""
    import torch

    places = [(torch.arange(count) + 0.5) / count for count in (width, height)]
    bins = torch.stack(torch.meshgrid(*places, indexing="xy"), -1).to(regions)
    starts, ends = regions[:, None, None, 1:3] * scale, regions[:, None, None, 3:5] * scale
    grid = 2 * (starts + (ends - starts) * bins) / regions.new_tensor(images.shape[:1:-1]) - 1
    pooled = images.new_zeros(len(regions), images.shape[1], height, width)
    for number, image in enumerate(images):
        own = regions[:, 0] == number
        pixels = torch.nn.functional.grid_sample(
            image[None], grid[own].flatten(0, 1)[None], padding_mode="border", align_corners=False
        )
        pooled[own] = pixels[0].view(images.shape[1], -1, height, width).transpose(0, 1)
    return pooled


_KERNELS = {"nms": _nms, "roi_align": _roi_align}
"""Kernels on the CPU of operators whose results decide what runs next."""
