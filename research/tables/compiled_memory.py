"""Tensors of steps under `torch.compile`: simulated here, and of inductor on a CPU
(docs/research/compiled_steps.md).

The peak counts what a step allocates, without parameters, optimizer states and inputs. A CPU's
library for convolutions allocates buffers of its own in backward passes, which are not simulated.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from trappm.profiler.models.zoo import create_model
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision
from trappm.profiler.simulation.kernel_profile import KernelKind
from trappm.profiler.simulation.memory_simulation import simulate_memory
from trappm.profiler.simulation.training_loop import Loop
from trappm.profiler.static_profile import step_profile, traced_phase
from trappm.profiler.tracing.tracer import StepOptions

MODELS = (
    ("resnet18", 128, 16), ("vit_tiny_patch16_224", 224, 8), ("mobilenetv3_small_100", 160, 32),
    ("convnext_atto", 128, 16), ("efficientnet_b0", 128, 16), ("regnety_002", 160, 16),
    ("mixer_s32_224", 224, 16), ("swin_tiny_patch4_window7_224", 224, 4), ("densenet121", 96, 8),
    ("resnet50", 128, 16),
)  # fmt: skip
"""Architecture, input size and batch size."""
MIB = 2**20


def peak_mib(step: Callable[[], object]) -> float:
    """Return the peak of what a step allocates on the CPU in MiB, by PyTorch's profiler."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return float(pd.Series([size for _, size in sorted(sizes)]).cumsum().max() / MIB)


def measured(
    name: str, input_size: int, batch_size: int, precision: Precision
) -> dict[tuple[Phase, bool], float]:
    """Return the peaks in MiB by phase, eager (False) and compiled (True)."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.AMP_BF16)
    peaks = {}
    images = torch.randn(batch_size, 3, input_size, input_size)
    targets = torch.zeros(batch_size, dtype=torch.long)
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model = create_model(name, input_size)
        run = torch.compile(model) if is_compiled else model

        def train(model: torch.nn.Module = model, run: Any = run) -> None:
            model.zero_grad()
            with autocast:
                loss = torch.nn.functional.cross_entropy(run(images), targets)
            loss.backward()  # type: ignore[no-untyped-call]

        def infer(run: Any = run) -> None:
            with torch.no_grad(), autocast:
                run(images)

        for phase, step in ((Phase.TRAIN, train), (Phase.INFER, infer)):
            model.train(phase is Phase.TRAIN)
            step()
            model.zero_grad()
            peaks[phase, is_compiled] = peak_mib(step)
    return peaks


def simulated(
    name: str, input_size: int, batch_size: int, precision: Precision
) -> dict[tuple[Phase, bool], float]:
    """Return the same peaks by the simulation; on a CPU, all convolutions are channels-last."""
    how = StepOptions(precision=precision)
    eager = step_profile(name, input_size, how)
    options = replace(how, is_compiled=True)
    if eager.kernels is not None and (eager.kernels.train.kinds <= KernelKind.DEPTHWISE).any():
        options = replace(options, memory_format=MemoryFormat.CHANNELS_LAST, copies_weights=True)
    trace = eager.trace
    present = float(trace.parameter_bytes.sum() + trace.buffer_bytes.sum())
    present += batch_size * 3 * input_size**2 * 4  # the images
    peaks = {}
    for phase in Phase:
        compiled, _ = traced_phase(name, input_size, phase, options)
        for is_compiled, trace in ((False, eager.trace_of(phase)), (True, compiled)):
            memory = simulate_memory(trace, batch_size, Loop.PLAIN.with_optimizer(Optimizer.SGD))
            peaks[phase, is_compiled] = memory.live_mib - present / MIB
    return peaks


def main(
    most: Annotated[int, typer.Option(help="Number of architectures.")] = len(MODELS),
    precision: Annotated[Precision, typer.Option(help="fp32 or amp-bf16.")] = Precision.FP32,
) -> None:
    """Print peaks in MiB and ratios compiled to eager; compiling takes a minute or more each."""
    warnings.filterwarnings("ignore")
    for case in MODELS[:most]:
        begun = time.perf_counter()
        ours, theirs = simulated(*case, precision), measured(*case, precision)
        for phase in Phase:
            eager, compiled = (phase, False), (phase, True)
            print(
                f"{case[0]:30} {phase:5} simulated {ours[eager]:6.1f} {ours[compiled]:6.1f}"
                f" real {theirs[eager]:6.1f} {theirs[compiled]:6.1f}"
                f" compiled {100 * (ours[compiled] / theirs[compiled] - 1):+5.1f} %"
                f" in {time.perf_counter() - begun:.0f} s",
                flush=True,
            )
