"""Live memory of a training step: simulated here and by PyTorch's MemTracker (docs/research).

`torch.distributed._tools.mem_tracker.MemTracker` runs the step on fake tensors and counts live
storages by category. It is independent of the simulation, so it is an oracle for live memory;
neither side includes the allocator, workspaces or the CUDA context here.
"""

from __future__ import annotations

import time
import warnings
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from trappm.profiler.errors import one_line
from trappm.profiler.models.zoo import create_model, input_size_of
from trappm.profiler.records import Optimizer
from trappm.profiler.simulation.training_loop import Loop
from trappm.profiler.static_profile import step_profile

MODELS = (
    "resnet50", "vgg16", "densenet121", "mobilenetv2_100", "efficientnet_b0", "regnetx_016",
    "mixer_b16_224", "vit_small_patch16_224", "convnext_tiny", "swin_tiny_patch4_window7_224",
)  # fmt: skip
MIB = 2**20


def tracked_mib(architecture: str, input_size: int, batch_size: int) -> float:
    """Return the largest live memory of two training steps with momentum, by MemTracker."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    model, mode = create_model(architecture, input_size), FakeTensorMode()
    for module in model.modules():  # made of values first: initialization reads some
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(mode.from_tensor(parameter.data)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, mode.from_tensor(buffer))
    with mode:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images = torch.empty(batch_size, 3, input_size, input_size)
        targets = torch.zeros(batch_size, dtype=torch.long)
        tracker: Any = MemTracker()
        tracker.track_external(model, optimizer, images, targets)
        with tracker:
            for step in range(2):
                torch.nn.functional.cross_entropy(model(images), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        peaks: dict[Any, dict[Any, int]] = tracker.get_tracker_snapshot("peak")
    return max(sum(v for k, v in p.items() if str(k) != "Total") for p in peaks.values()) / MIB


def simulated_mib(architecture: str, input_size: int, batch_size: int) -> float:
    """Return the largest live memory of the same steps, by the simulation."""
    step = step_profile(architecture, input_size)
    return float(step.memory(batch_size, Optimizer.MOMENTUM, Loop.PLAIN).live_mib)


def main(
    batch_size: Annotated[int, typer.Option(help="Number of samples per step.")] = 32,
) -> None:
    """Print live memory and run time of both for ten architectures."""
    warnings.filterwarnings("ignore")
    rows = []
    for name in MODELS:
        size = input_size_of(name, None)
        row: dict[str, object] = {"architecture": name}
        for what, estimate in (("simulated", simulated_mib), ("MemTracker", tracked_mib)):
            begun = time.perf_counter()
            try:
                row[f"{what}_mib"] = round(estimate(name, size, batch_size))
            except Exception as error:  # MemTracker fails in many ways, which the table reports
                row["refusal"] = one_line(error)[:60]
            row[f"{what}_s"] = round(time.perf_counter() - begun, 1)
        rows.append(row)
        print(row, flush=True)
    table = pd.DataFrame(rows)
    table["ratio"] = table["simulated_mib"] / table.get("MemTracker_mib", float("nan"))
    print(table.round(3).to_string(index=False))
