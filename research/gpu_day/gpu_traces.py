"""Kernels and allocations of whole training steps on a GPU, as PyTorch reports them.

Writes kernels.csv.xz, one line per kernel (time, operator, shapes), of the second of two profiled
steps; and allocations.jsonl.xz, one line per configuration: all requests to the caching allocator
while a model is created and runs two steps. Needs what a sweep needs (docs/gpu_day.md).
"""

from __future__ import annotations

import csv
import gc
import json
import lzma
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trappm.profiler.devices import open_device
from trappm.profiler.devices.base import StepDevice
from trappm.profiler.errors import InputError
from trappm.profiler.records import Configuration
from trappm.profiler.steps.step import make_step

COLUMNS = (
    "architecture", "batch_size", "input_size", "precision", "memory_format", "optimizer",
    "phase", "order", "operator", "input_shapes", "input_types", "kernel", "grid", "block",
    "duration_us",
)  # fmt: skip
_DEVICE_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
_FRAMES = 6
_ALLOCATIONS_SHARE = 0.3
"""Largest share of the time for allocations."""

_BF16, _FP16 = {"precision": "amp-bf16"}, {"precision": "amp-fp16"}
_NHWC, _INFER = {"memory_format": "channels-last"}, {"phase": "infer"}

ALLOCATIONS: tuple[tuple[str, int, Mapping[str, str]], ...] = (
    ("convnext_nano", 32, {}),
    ("poolformerv2_s12", 32, {}),
    ("swin_tiny_patch4_window7_224", 64, _FP16),
    ("efficientnet_b0", 64, _BF16),
    ("resnet50", 32, {}),
    ("vit_small_patch32_224", 64, _BF16),
    ("vgg11", 32, {}),
    ("convnext_nano", 64, _INFER),
    ("efficientnet_es", 128, {}),
    ("resnet26", 64, _FP16),
)
KERNELS: tuple[tuple[str, int, Mapping[str, str]], ...] = (
    ("resnet50", 32, {}),
    ("convnext_nano", 128, {}),
    ("mobilenetv2_100", 128, {}),
    ("resnet50", 64, _BF16 | _NHWC),
    ("vit_tiny_patch16_224", 32, {}),
    ("efficientnet_b0", 32, {}),
    ("vgg11", 32, {}),
    ("swin_tiny_patch4_window7_224", 32, {}),
    ("resnet50", 64, _FP16),
    ("densenet121", 32, {}),
    ("visformer_small", 128, {}),
    ("poolformer_s12", 128, {}),
    ("mnasnet_100", 128, {}),
    ("swin_tiny_patch4_window7_224", 64, _BF16),
    ("resnet50", 64, _INFER),
    ("convnext_nano", 64, _BF16),
    ("vit_small_patch32_224", 128, {}),
    ("efficientnet_es", 128, {}),
    ("resnet18", 128, {}),
    ("poolformerv2_s12", 32, {}),
    ("vit_tiny_patch16_224", 64, _BF16),
    ("convnext_nano", 64, _INFER),
    ("resnet50", 32, {"optimizer": "adam"}),
    ("efficientnet_b0", 64, _FP16 | _NHWC),
    ("mobilenetv3_large_100", 128, {}),
    ("vgg11_bn", 32, {}),
    ("efficientnet_b0", 64, _INFER),
    ("vit_tiny_patch16_224", 64, _INFER),
    ("resnet26", 64, _BF16),
    ("visformer_small", 64, _FP16),
)


def kernel_rows(configuration: Configuration, events: Iterable[dict[str, Any]]) -> Iterator[list]:
    """Yield lines of `COLUMNS` for the kernels of the second of two equal steps of a trace."""
    operators, kernels = {}, []
    for event in events:
        if event.get("cat") == "cpu_op":
            operators[event["args"].get("External id")] = event
        elif event.get("cat") in _DEVICE_EVENTS:
            kernels.append(event)
    kernels.sort(key=lambda event: event["ts"])
    setting = [*configuration.to_dict().values()]
    for order, kernel in enumerate(kernels[len(kernels) // 2 :]):
        facts = kernel["args"]
        operator = operators.get(facts.get("External id"), {"name": "", "args": {}})
        yield [
            *setting, order, operator["name"],
            json.dumps(operator["args"].get("Input Dims")),
            json.dumps(operator["args"].get("Input type")),
            kernel["name"], json.dumps(facts.get("grid")), json.dumps(facts.get("block")),
            kernel["dur"],
        ]  # fmt: skip


def allocation_record(
    configuration: Configuration,
    trace: Iterable[Mapping[str, Any]],
    peak_bytes: tuple[int, int],
) -> dict[str, Any]:
    """Return the allocator's requests: [bytes, stack] takes a block, [-number] frees it.

    Blocks are numbered from 1 in the order in which they are taken. `segments_bytes` are the
    segments that the allocator took from the device, in order.
    """
    numbers: dict[int, int] = {}
    requests: list[list[Any]] = []
    segments = []
    taken = 0
    for event in trace:
        action, address = event["action"], event["addr"]
        if action == "alloc":
            taken += 1
            numbers[address] = taken
            frames = [f for f in event.get("frames", []) if "profiler" not in f["filename"]]
            requests.append([event["size"], [_frame(f) for f in frames[:_FRAMES]]])
        elif action == "free_requested" and address in numbers:
            requests.append([-numbers.pop(address)])
        elif action == "segment_alloc":
            segments.append(event["size"])
    return {
        "configuration": configuration.to_dict(),
        "peak_allocated_bytes": peak_bytes[0],
        "peak_reserved_bytes": peak_bytes[1],
        "segments_bytes": segments,
        "requests": requests,
    }


def _frame(frame: Mapping[str, Any]) -> str:
    return f"{Path(frame['filename']).name}:{frame['line']}:{frame['name']}"


def _traced_kernels(configuration: Configuration, device: StepDevice) -> list[list]:
    from torch.profiler import ProfilerActivity, profile

    step = make_step(configuration, device.torch_device)
    device.time_steps(step, 14)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True
    ) as profiler:
        device.time_steps(step, 1)  # and one before it
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return list(kernel_rows(configuration, json.load(file)["traceEvents"]))


def _traced_allocations(configuration: Configuration, device: StepDevice) -> dict[str, Any]:
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    step = make_step(configuration, device.torch_device)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    peak_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return allocation_record(configuration, trace, peak_bytes)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    seconds: Annotated[float, typer.Option(help="Start no configuration after this time.")] = 85.0,
) -> None:
    """Record the kernels and allocations of the configurations above.

    Raises:
        InputError: The folder has traces already, or cuda:0 cannot run steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if taken := list(folder.glob("*.xz")):
        raise InputError(f"{taken[0]} exists; name another folder")
    begin = time.monotonic()
    device = open_device("cuda:0")
    if not isinstance(device, StepDevice):
        raise InputError("cuda:0 cannot run steps")
    device.prepare()

    def each(
        listed: Iterable[tuple[str, int, Mapping[str, str]]], share: float
    ) -> Iterator[Configuration]:
        for architecture, batch_size, changes in listed:
            if time.monotonic() - begin > share * seconds:
                return
            plain = {"architecture": architecture, "batch_size": batch_size, "input_size": 224}
            configuration = Configuration(**{**plain, **changes})
            print(configuration, flush=True)
            yield configuration

    with lzma.open(folder / "allocations.jsonl.xz", "wt", encoding="utf-8") as file:
        for configuration in each(ALLOCATIONS, _ALLOCATIONS_SHARE):
            print(json.dumps(_traced_allocations(configuration, device)), file=file)
    with lzma.open(folder / "kernels.csv.xz", "wt", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for configuration in each(KERNELS, 1.0):
            table.writerows(_traced_kernels(configuration, device))


if __name__ == "__main__":
    typer.run(main)
