"""Whole answers of all kinds, and the steps behind them, for recordings.

Others than the recorded predictions, these have every part of an answer: intervals, remarks,
the memory by part, module and tensor, and what each kernel of a step computes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from feature_zoo import Convolutions, OtherOperators
from foreign_modules import MODULES
from torch import nn

import trappm
from trappm.prediction.comparison import comparison_json
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.records import Phase, Precision
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import TraceSettings
from trappm.profiler.tracing.losses import default_loss
from trappm.profiler.tracing.tracer import Tracer

TIMM = "test_vit2"
RUN = {"epochs": 3, "samples": 50_000}


def _module() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(2048, 1000),
    )  # fmt: skip


def _of_module(optimizer: Any, **settings: Any) -> trappm.Prediction:
    """Ask about a module whose optimizer is made of its parameters."""
    module = _module()
    images, classes = torch.empty(32, 3, 128, 128), torch.zeros(32, dtype=torch.long)
    return trappm.predict(
        module, example_input=images, targets=classes, optimizer=optimizer(module), **settings
    )


def _two_groups(module: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": module[:5].parameters(), "lr": 0.01}, {"params": module[8].parameters()}]
    return torch.optim.AdamW(groups, lr=0.1, foreach=True)


def _elsewhere(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of a part of the module, and of parameters that it does not have."""
    return torch.optim.SGD([*module[0].parameters(), *nn.Linear(9, 9).parameters()], momentum=0.9)


def _loop(module: nn.Module) -> trappm.TrainingLoop:
    return trappm.TrainingLoop(optimizer="adam", accumulation_steps=4, set_to_none=False)


QUESTIONS: dict[str, Callable[[], trappm.Prediction]] = {
    "run": lambda: trappm.predict(TIMM, batch_size=8, **RUN),
    "price and carbon": lambda: trappm.predict(
        TIMM, batch_size=64, device="a100-80gb", carbon_g_per_kwh=300, usd_per_hour=2.5, **RUN
    ),
    "power limit": lambda: trappm.predict(TIMM, batch_size=64, device="a100", power_limit_w=200),
    "compiled": lambda: trappm.predict(TIMM, batch_size=16, device="a100", execution="compile"),
    "inference": lambda: trappm.predict(TIMM, batch_size=1, device="v100", phase="infer"),
    "accumulation": lambda: trappm.predict(
        TIMM, batch_size=16, device="v100", precision="amp-fp16", accumulation=4, optimizer="adamw",
        memory_format="channels-last",
    ),
    "does not fit": lambda: trappm.predict("vgg13_bn", batch_size=700, device="v100"),
    "barely": lambda: trappm.predict("vgg13_bn", batch_size=125, device="v100"),
    "without labels": lambda: trappm.predict(TIMM, batch_size=32, device="l40s"),
    "new card, bf16": lambda: trappm.predict(
        TIMM, batch_size=32, device="b200", precision="bf16", phase="infer"
    ),
    "cpu": lambda: trappm.predict(TIMM, batch_size=4, device="cpu-2t"),
    "tokens": lambda: trappm.predict(
        "hf:gpt2-tiny", batch_size=4, sequence_length=100, device="h100", precision="amp-bf16"
    ),
    "groups": lambda: _of_module(_two_groups, device="a100"),
    "part of the parameters": lambda: _of_module(_elsewhere, device="rtx3090"),
    "loop": lambda: _of_module(_loop, device="h100", precision="bf16"),
    "optimizer's step": lambda: trappm.predict(
        nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))), device="a100",
        example_input=torch.empty(4, 2048), optimizer="adamw", precision="fp32",
    ),
    "freed slowly": lambda: trappm.predict(
        "vgg11_bn", batch_size=16, device="t4", precision="amp-fp16",
        optimizer=trappm.TrainingLoop(cudnn_benchmark=True, expandable_segments=True),
    ),
}  # fmt: skip
BROKEN_DOWN = (
    "groups",
    "part of the parameters",
    "loop",
    "accumulation",
    "inference",
    "tokens",
    "optimizer's step",
)


def answers() -> list[dict[str, Any]]:
    """Return each answer as `--json` prints it, some with the parts of their memory."""
    return [
        {"question": name}
        | json.loads(json.dumps(ask().to_dict(breakdown_depth=3 if name in BROKEN_DOWN else None)))
        for name, ask in QUESTIONS.items()
    ]


def comparisons() -> list[dict[str, Any]]:
    """Return what is said of several models and devices next to each other."""
    devices = ["a100", "v100", "l40s", "cpu-2t"]
    of_devices = trappm.compare(TIMM, devices, batch_size=64, **RUN)
    of_models = trappm.compare([TIMM, "vgg13_bn"], ["v100"], batch_size=300)
    return json.loads(json.dumps([comparison_json(each, []) for each in (of_devices, of_models)]))


def steps() -> list[dict[str, Any]]:
    """Return the kernels and allocations of steps with every kind of operator, in numbers."""
    return list(itertools.chain(_foreign_steps(), _zoo_steps()))


def _foreign_steps() -> Iterator[dict[str, Any]]:
    for foreign in MODULES:
        if foreign.by_values or "Hugging Face" in foreign.name:
            continue
        args, kwargs = foreign.call()
        loss = foreign.loss
        tracer = Tracer(
            on_meta(foreign.build(), None),
            ExampleInputs.of(*args, **kwargs),
            batch_sizes=(8, 32),
            loss=default_loss if loss is None else lambda output, _, loss=loss: loss(output),
        )
        yield {"step": foreign.name} | _numbers(tracer.trace())


def _zoo_steps() -> Iterator[dict[str, Any]]:
    for build in (Convolutions, OtherOperators):
        for phase, precision in ((Phase.TRAIN, Precision.AMP_FP16), (Phase.INFER, Precision.FP32)):
            settings = TraceSettings(precision=precision)
            yield {"step": f"{build.__name__}, {phase}"} | _numbers(
                trace(build(), 32, settings, phase)
            )


def _numbers(traced: Any) -> dict[str, Any]:
    table, memory = traced.kernels.table, traced.allocations
    names = ("kinds", "passes", "counts", "half", "channels_last", "windows", "strides", "pixels")
    kernels = [
        [*(int(getattr(table, name)[row]) for name in names), *table.sizes[row].ravel().tolist()]
        for row in range(len(table))
    ]
    sizes = memory.sizes_at(8).astype(float)
    place = np.arange(1, len(sizes) + 1)
    return {
        "kernels": kernels,
        "saved_bytes": None if traced.saved_bytes is None else int(traced.saved_bytes.at(8)),
        "events": np.bincount(memory.kinds).tolist(),
        "bytes": float(sizes.sum()),
        "bytes in order": float(sizes @ place),
        "blocks in order": int(memory.blocks @ place),
    }
