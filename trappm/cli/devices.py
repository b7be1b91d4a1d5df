"""`trappm devices`: which devices are predicted, and what is known of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import options, shell
from trappm.cli.options import AsJson, print_json
from trappm.profiler.errors import SnapshotError
from trappm.profiler.records import METRICS
from trappm.terminal.tables import print_line

if TYPE_CHECKING:
    from trappm.prediction.device_names import DeviceEvidence
    from trappm.profiler.kernels.kernel_call import KernelMeasurement

DETAILS: list[Callable[[str, Sequence[KernelMeasurement]], str | None]] = []
"""Functions of extensions that describe a device by its timed kernels."""


def devices(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Devices to show, by any of their names (default: list all).",
            autocompletion=shell.devices,
        ),
    ] = None,
    snapshot: options.SnapshotName = None,
    as_json: AsJson = False,
) -> None:
    """List the devices that are predicted, or show the memory, evidence and kernels of some.

    Example: trappm devices v100 a100
    """
    from trappm.prediction.device_names import DeviceEvidence
    from trappm.prediction.device_names import devices as evidence

    if not names:
        rows = evidence(snapshot)
        if as_json:
            print_json([asdict(row) for row in rows])
        else:
            _print_devices(rows)
        return
    shown = []
    for name in names:
        kernels = _kernels(name)
        try:
            [row] = evidence(snapshot, [name])
        except SnapshotError:
            if not kernels:
                raise
            row = DeviceEvidence(name, None, {})  # its kernels alone are known
        shown.append((row, kernels or _kernels(row.device)))
    if as_json:
        print_json([{**asdict(row), "kernels": len(kernels)} for row, kernels in shown])
        return
    for row, kernels in shown:
        details = [detail(row.device, kernels) for detail in DETAILS]
        _print_device(row, len(kernels), [line for line in details if line is not None])


def _kernels(key: str) -> list[KernelMeasurement]:
    """Return the timed kernels of a device; none without the libraries of the label store."""
    if find_spec("sqlalchemy") is None:
        return []
    from trappm.label_store import store_or_none_yet
    from trappm.store import Home

    with store_or_none_yet(Home.find()) as store:
        return store.kernels.latest(key) if key in store.kernels.devices() else []


_NAMES = {"train": "training", "infer": "inference"}


def _print_devices(rows: Sequence[DeviceEvidence]) -> None:
    """Print all devices, those of the same evidence together."""
    groups: dict[str, list[DeviceEvidence]] = {}
    for row in sorted(rows, key=lambda row: not row.has_labels):
        groups.setdefault(_evidence(row), []).append(row)
    for evidence, devices in groups.items():
        print_line(f"{evidence}:")
        print_line(f"  {', '.join(map(_device, devices))}", style="bold")
    print_line(
        "A card has several names. Predictions without labels of the device have wider intervals.",
        style="dim",
    )


def _print_device(row: DeviceEvidence, kernel_count: int, details: Sequence[str]) -> None:
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
    """Return such as `step time from its labels, memory from the simulated step alone`."""
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
