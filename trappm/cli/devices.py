"""`trappm devices`: which devices are predicted, and what is known of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import options, shell
from trappm.cli.options import AsJson, print_json
from trappm.profiler.records import METRICS
from trappm.terminal.tables import print_line

if TYPE_CHECKING:
    from trappm.prediction.selection import DeviceEvidence


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
    """List the devices that are predicted, or show the memory and evidence of some.

    Example: trappm devices v100 a100
    """
    from trappm.prediction.selection import devices as list_devices

    rows = list_devices(snapshot, names or None)
    if as_json:
        print_json([asdict(row) for row in rows])
    elif names:
        for row in rows:
            _print_device(row)
    else:
        _print_devices(rows)


_NAMES = {"train": "training", "infer": "inference"}


def _print_devices(rows: Sequence[DeviceEvidence]) -> None:
    """Print all devices, those of the same evidence together."""
    groups: dict[str, list[DeviceEvidence]] = {}
    for row in sorted(rows, key=lambda row: not row.has_labels):
        groups.setdefault(_evidence_text(row), []).append(row)
    for evidence, devices in groups.items():
        print_line(f"{evidence}:")
        print_line(f"  {', '.join(map(_device_text, devices))}", style="bold")
    print_line(
        "A card has several names. Predictions without labels of the device have wider intervals.",
        style="dim",
    )


def _print_device(row: DeviceEvidence) -> None:
    """Print the evidence of one device."""
    print_line(_device_text(row), style="bold")
    for phase, by_metric in row.evidence.items():
        print_line(f"  {_NAMES[phase]}: {_sentence(by_metric)}")


def _device_text(row: DeviceEvidence) -> str:
    if row.memory_gib is None or row.device.endswith("gb"):
        return row.device
    return f"{row.device} ({row.memory_gib:.0f}\N{NO-BREAK SPACE}GiB)"


def _evidence_text(row: DeviceEvidence) -> str:
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
