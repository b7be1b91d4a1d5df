"""Estimates of memory on the terminal: the answer, what it is made of, and the largest tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trappm.prediction.device_names import device_title, precision_gap
from trappm.prediction.fitting import room_text
from trappm.terminal.tables import console, print_line, table

if TYPE_CHECKING:
    from trappm.prediction.estimate import Estimate

_BAR = 30


def print_estimate(
    estimate: Estimate, devices: Sequence[str], depth: int, *, is_default: bool = False
) -> None:
    """Print a sentence for each device; then parts, modules and the largest tensors.

    Args:
        estimate: The estimate.
        devices: Names of cards.
        depth: Depth of the tree of modules.
        is_default: Whether the question named no device.
    """
    out = console()
    gaps = {name: gap for name in devices if (gap := precision_gap(name, estimate.precision))}
    devices = [name for name in devices if name not in gaps] or devices
    for device in devices:
        name = f"{device_title(device)} (default)" if is_default else device_title(device)
        print_line(_answer(estimate, device, name))
    for note in [*(f"Left out: {gap}" for gap in gaps.values()), *estimate.remarks]:
        print_line(note, style="dim")
    breakdown = estimate.breakdown(devices[0])
    total_mib = breakdown.total_mib
    out.print(f"\nat its peak, on {device_title(devices[0])}", style="bold", markup=False)
    rows = [
        (part.value, float(round(size_mib)), _bar(size_mib / total_mib))
        for part, size_mib in sorted(breakdown.parts_mib.items(), key=lambda row: -row[1])
    ]
    out.print(table("", ("part", "MiB", ""), rows))
    out.print(f"the peak is in {breakdown.moment}", markup=False)
    modules = [
        (module.name, float(round(module.size_mib)), _bar(module.size_mib / total_mib))
        for module in breakdown.modules.walk(depth)
        if module.size_mib >= total_mib / 200
    ]
    if modules:
        out.print("\nactivations by module", style="bold")
        out.print(table("", ("module", "MiB", ""), modules))
    out.print("\nthe largest tensors", style="bold")
    tensors = [
        (
            float(round(tensor.size_mib)),
            tensor.origin.module,
            tensor.origin.operator.lstrip("_"),
            tensor.origin.line.rpartition("/")[2],  # folders have no room on a screen
        )
        for tensor in breakdown.largest
    ]
    out.print(table("", ("MiB", "module", "operator", "line"), tensors))


def _answer(estimate: Estimate, device: str, name: str) -> str:
    memory, capacity_mib = estimate.memory(device), estimate.capacity_mib(device)
    room = room_text(memory.verdict(capacity_mib), name, memory, capacity_mib)
    step = "a training step" if estimate.phase == "train" else "an inference step"
    largest = ""
    if estimate.only_batch is None:
        largest = f" Largest batch that fits: {estimate.largest_batch(device):,}."
    return (
        f"{room} for {step} of {estimate.name} in {estimate.precision} at batch "
        f"{estimate.batch_size:,}.{largest}"
    )


def _bar(share: float) -> str:
    return "█" * round(share * _BAR) or "▏"
