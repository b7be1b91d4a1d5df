"""Live memory of a training step by PyTorch's MemTracker.

`torch.distributed._tools.mem_tracker.MemTracker` runs the step on fake tensors and counts live
storages by category. It shares no code with the simulation, and has neither allocator, workspaces
nor CUDA context.
"""

from __future__ import annotations

from typing import Any

import torch

from trappm.profiler.models.zoo import create_model

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
                loss: Any = torch.nn.functional.cross_entropy(model(images), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        peaks: dict[Any, dict[Any, int]] = tracker.get_tracker_snapshot("peak")
    return max(sum(v for k, v in p.items() if str(k) != "Total") for p in peaks.values()) / MIB
