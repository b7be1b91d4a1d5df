"""Estimates of memory on the terminal: the answer, what it is made of, and the largest tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trappm.profiler.devices.capacity import USABLE_SHARE
from trappm.terminal.tables import console, table

if TYPE_CHECKING:
    from trappm.prediction.estimate import Estimate

_BAR = 30
_GIB = 1024.0


def print_estimate(estimate: Estimate, devices: Sequence[str], depth: int) -> None:
    """The answer for each device in a sentence; then parts, modules and the largest tensors."""
    out = console()
    for device in devices:
        out.print(_answer(estimate, device), markup=False)
    for remark in estimate.remarks:
        out.print(remark, style="dim", markup=False)
    breakdown = estimate.breakdown(devices[0])
    total_mib = breakdown.total_mib
    out.print(f"\nat its peak, on {devices[0]}", style="bold", markup=False)
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


def _answer(estimate: Estimate, device: str) -> str:
    step = "A training step" if estimate.phase == "train" else "An inference step"
    verdict = "fits" if estimate.fits(device) else "does not fit"
    memory_gib = estimate.memory_mib(device) / _GIB
    sentence = (
        f"{step} of {estimate.name} at batch {estimate.batch_size:,} {verdict} {device}: "
        f"{memory_gib:,.1f} of {estimate.capacity_mib(device) / _GIB:,.1f} GiB, of which "
        f"{1 - USABLE_SHARE:.0%} must stay free"
    )
    if estimate.only_batch is not None:
        return sentence
    return f"{sentence}; the largest batch that fits is {estimate.largest_batch(device):,}"


def _bar(share: float) -> str:
    return "█" * round(share * _BAR) or "▏"
