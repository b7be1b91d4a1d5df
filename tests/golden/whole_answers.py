"""Whole answers of all kinds, for recordings.

Unlike the recorded predictions, these have every part of an answer: intervals, remarks, and the
memory by part, module and tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

import trappm
from trappm.prediction.comparison import comparison_json
from trappm.profiler.devices import open_device
from trappm.profiler.records import QUICK, Configuration, MemoryFormat, Optimizer, Phase, Precision

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


def simulated() -> list[dict[str, Any]]:
    """Return what simulated cards measure of a step in several settings."""
    of_vit = Configuration(architecture=TIMM, batch_size=64, input_size=160)
    changes: list[dict[str, Any]] = [
        {}, {"phase": Phase.INFER}, {"precision": Precision.TF32, "optimizer": Optimizer.ADAM},
        {"precision": Precision.AMP_FP16, "memory_format": MemoryFormat.CHANNELS_LAST},
        {"batch_size": 20_000},
    ]  # fmt: skip
    measured = [
        {"device": key, "changes": str(change)}
        | asdict(open_device(key).measure(replace(of_vit, **change), QUICK, lambda phase: None))
        for key in ("simulated:a100", "simulated:v100")
        for change in changes
    ]
    return json.loads(json.dumps(measured))


def comparisons() -> list[dict[str, Any]]:
    """Return what is said of several models and devices next to each other."""
    devices = ["a100", "v100", "l40s", "cpu-2t"]
    of_devices = trappm.compare(TIMM, devices, batch_size=64, **RUN)
    of_models = trappm.compare([TIMM, "vgg13_bn"], ["v100"], batch_size=300)
    return json.loads(json.dumps([comparison_json(each, []) for each in (of_devices, of_models)]))
