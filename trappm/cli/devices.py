"""`trappm devices`: which devices are predicted, and what is known of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import options, shell
from trappm.cli.options import AsJson, print_json
from trappm.profiler.errors import SnapshotError

if TYPE_CHECKING:
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
    from trappm.terminal.device_tables import print_device, print_devices

    if not names:
        rows = evidence(snapshot)
        if as_json:
            print_json([asdict(row) for row in rows])
        else:
            print_devices(rows)
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
        print_device(row, len(kernels), [line for line in details if line is not None])


def _kernels(key: str) -> list[KernelMeasurement]:
    """Return the timed kernels of a device; none without the libraries of the label store."""
    if find_spec("sqlalchemy") is None:
        return []
    from trappm.label_store import store_or_none_yet
    from trappm.store import Home

    with store_or_none_yet(Home.find()) as store:
        return store.kernels.latest(key) if key in store.kernels.devices() else []
