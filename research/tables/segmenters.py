"""Training memory of mmsegmentation's models on V100, published and simulated.

The published figure is the largest allocated memory of a process (`max_memory_allocated`: neither
context nor fragments) that trains by DDP. Models are built from the wheel's configurations; no V100
label has a part in the simulation. It needs, in an environment of its own or with `--target`:

    pip install --no-deps mmsegmentation==1.2.2 mmcv-lite==2.1.0 mmengine==0.10.7 addict ftfy \
        opencv-python-headless prettytable termcolor wcwidth yapf
"""

from __future__ import annotations

import gc
import sys
import types
import warnings
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from torch import Tensor, nn

import trappm
from research.data import data_folder
from trappm.profiler.errors import UnsupportedModelError, one_line
from trappm.profiler.simulation.memory_breakdown import Part

SHEET = "new/mmsegmentation_v100.csv.gz"
DEVICE = "v100-32gb"
OPTIMIZERS = {"SGD": "momentum", "AdamW": "adamw", "Adam": "adam"}
NOT_ALLOCATED = (Part.CONTEXT, Part.FRAGMENTS)
MIB = 2**20


class _SavedInput(torch.autograd.Function):
    """An identity that saves its input, as softmax did in PyTorch of 2020."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def as_in_2020() -> None:
    """Let softmax and cross-entropy keep their inputs for the backward pass."""
    for name in ("softmax", "cross_entropy"):
        function = getattr(F, name)

        def keeping(x: Tensor, *args: Any, _function: Any = function, **kwargs: Any) -> Tensor:
            kept: Tensor = _function(_SavedInput.apply(x), *args, **kwargs)
            return kept

        setattr(F, name, keeping)


def import_mmseg() -> Path:
    """Import mmsegmentation without mmcv's compiled operators; return the folder of the wheel."""

    class Compiled:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise UnsupportedModelError("needs a compiled operator of mmcv")

    def of_name(name: str) -> type[Compiled]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Compiled

    operators = types.ModuleType("mmcv.ops")
    operators.__getattr__ = of_name  # type: ignore[method-assign]
    sys.modules["mmcv.ops"] = operators
    import mmseg.models
    from mmengine.registry import init_default_scope

    # Evaluation of the accuracy reads values; its tensors are small and freed before the peak.
    mmseg.models.decode_heads.decode_head.accuracy = lambda *_, **__: torch.zeros(1)
    init_default_scope("mmseg")
    return Path(mmseg.__file__).parent / ".mim"


class LossOfBatch(nn.Module):
    """A segmenter that returns the sum of its losses."""

    def __init__(self, segmenter: nn.Module) -> None:
        super().__init__()
        self.segmenter = segmenter

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        shape = tuple(images.shape[2:])
        about = {"img_shape": shape, "pad_shape": shape, "padding_size": [0] * 4}
        samples = [SegDataSample(metainfo=about) for _ in images]
        for sample, of_sample in zip(samples, labels, strict=True):
            sample.gt_sem_seg = PixelData(data=of_sample)
        losses = self.segmenter(images, samples, mode="loss")
        parts = [value for name, value in losses.items() if "loss" in name]
        return torch.stack([sum(part) if isinstance(part, list) else part for part in parts]).sum()


def simulated_mib(folder: Path, row: Any) -> float:
    """Return the allocated memory of a model's training step, with DDP's copy of the gradients."""
    from mmengine.config import Config
    from mmengine.model import revert_sync_batchnorm
    from mmseg.registry import MODELS

    config = Config.fromfile(folder / row.config)
    _without_weights(config.model)
    module = LossOfBatch(revert_sync_batchnorm(MODELS.build(config.model)))
    count, height, width = int(row.batch_per_gpu), int(row.height), int(row.width)
    loop = trappm.TrainingLoop(
        optimizer=OPTIMIZERS[config.optim_wrapper.optimizer.type],
        weight_decay=True,
        cudnn_benchmark=True,
    )
    inputs = (
        torch.empty(count, 3, height, width),
        torch.zeros(count, 1, height, width, dtype=torch.long),
    )
    answer = trappm.predict(
        module,
        example_input=inputs,
        loss=lambda output: output,
        device=DEVICE,
        precision="fp32" if str(row.amp) == "False" else "amp-fp16",
        optimizer=loop,
    )
    parts = answer.memory_breakdown.parts_mib
    allocated = sum(size for part, size in parts.items() if part not in NOT_ALLOCATED)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return allocated + trained / MIB


def _without_weights(config: Any) -> None:
    """Remove the pretrained weights of a configuration, which would be downloaded."""
    parts = config.values() if isinstance(config, dict) else config
    if isinstance(config, dict):
        for name in {"pretrained", "init_cfg"} & config.keys():
            config[name] = None
    for part in parts:
        if isinstance(part, dict | list | tuple):
            _without_weights(part)


def main(
    count: Annotated[int, typer.Option(help="Number of rows, drawn by chance.")] = 10_000,
) -> None:
    """Print the errors in percent by kind of model, and what cannot be built or traced."""
    warnings.simplefilter("ignore")
    sheet = pd.read_csv(data_folder() / SHEET).dropna(subset=["memory_gb", "batch_per_gpu"])
    sheet = sheet.sample(min(count, len(sheet)), random_state=0)
    folder = import_mmseg()
    as_in_2020()
    rows, refused = [], []
    for row in sheet.itertuples():
        gc.collect()  # a model's weights are of its real size
        try:
            mib = simulated_mib(folder, row)
        except Exception as error:
            refused.append((row.collection, one_line(error)[:80]))
        else:
            rows.append((row.collection, mib / (row.memory_gb * 1024) - 1))
    frame = pd.DataFrame(rows, columns=["collection", "error"])
    percent = 100 * frame["error"].abs()
    print(f"{len(frame)} models: {percent.mean():.1f} / {percent.median():.1f} %, mean and median")
    print(f"within 10 %: {np.mean(percent <= 10):.0%}")
    by = (100 * frame.set_index("collection")["error"]).groupby("collection")
    table = by.agg(["count", "mean", lambda x: x.abs().mean()])
    print(table.set_axis(["models", "bias", "error"], axis=1).round(1).to_string())
    for collection, reason in sorted(set(refused)):
        print(f"refused: {collection}: {reason}")
