"""Devices that can be answered for on the terminal, those of the same evidence together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from trappm.profiler.records import METRICS
from trappm.terminal.tables import console, print_line

if TYPE_CHECKING:
    from trappm.prediction.device_names import DeviceEvidence

_NAMES = {"train": "training", "infer": "inference"}


def print_devices(rows: Sequence[DeviceEvidence]) -> None:
    groups: dict[str, list[DeviceEvidence]] = {}
    for row in sorted(rows, key=lambda row: not row.has_labels):
        groups.setdefault(_evidence(row), []).append(row)
    for evidence, devices in groups.items():
        print_line(f"{evidence}:")
        console().print(Padding(Text(", ".join(map(_device, devices)), style="bold"), (0, 0, 0, 2)))
    print_line(
        "A card goes by any of its usual names. What rests on no labels of the device has wider "
        "intervals, and the answer says so.",
        style="dim",
    )


def print_device(row: DeviceEvidence, kernel_count: int, details: Sequence[str]) -> None:
    """Print the evidence of one device, the number of its timed kernels, and details."""
    print_line(_device(row), style="bold")
    for phase, by_metric in row.evidence.items():
        print_line(f"  {_NAMES[phase]}: {_sentence(by_metric)}")
    print_line(f"  timed kernels: {kernel_count:,}")
    for detail in details:
        print_line(f"  {detail}")


def _device(row: DeviceEvidence) -> str:
    if row.memory_gib is None or row.device.endswith("gb"):
        return row.device
    return f"{row.device} ({row.memory_gib:.0f}\N{NO-BREAK SPACE}GiB)"


def _evidence(row: DeviceEvidence) -> str:
    """Such as `step time from its labels, memory from the simulated step alone`."""
    phases: dict[str, list[str]] = {}
    for phase, by_metric in row.evidence.items():
        phases.setdefault(_sentence(by_metric), []).append(_NAMES[phase])
    both = len(row.evidence) > 1
    return "; ".join(
        text if both and len(names) > 1 else f"{', '.join(names)}: {text}"
        for text, names in phases.items()
    )


def _sentence(by_metric: Mapping[str, str]) -> str:
    bases: dict[str, list[str]] = {}
    for metric in METRICS:
        if metric in by_metric:
            name = metric.removesuffix("_ms").removesuffix("_mib").removesuffix("_w")
            bases.setdefault(by_metric[metric], []).append(name.replace("_", " "))
    return ", ".join(f"{' and '.join(names)} from {basis}" for basis, names in bases.items())
