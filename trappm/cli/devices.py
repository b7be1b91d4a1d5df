"""`trappm devices`: which devices are predicted, and what is known of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import options, shell
from trappm.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from trappm.profiler.kernels.kernel_measurement import KernelMeasurement

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
    from trappm.prediction.device_names import devices as evidence

    rows = evidence(snapshot)
    if not names:
        if as_json:
            print_json([asdict(row) for row in rows])
        else:
            from trappm.terminal.device_tables import print_devices

            print_devices(rows)
        return
    from trappm.label_store import store_or_none_yet
    from trappm.prediction.device_names import key_among
    from trappm.prediction.snapshot_choice import manifests_that_answer
    from trappm.profiler.errors import SnapshotError
    from trappm.store import Home
    from trappm.terminal.device_tables import print_device

    known, manifests = {row.device: row for row in rows}, manifests_that_answer(snapshot)
    shown = []
    with store_or_none_yet(Home.find()) as store:
        counts = store.kernels.devices()
        for name in names:
            key, row = name, None
            try:
                key = key_among(manifests, name)
                row = known[key]
            except SnapshotError:
                if name not in counts:
                    raise
            shown.append((key, row, store.kernels.latest(key) if key in counts else []))
    if as_json:
        print_json(
            [
                {**({"device": key} if row is None else asdict(row)), "kernels": len(kernels)}
                for key, row, kernels in shown
            ]
        )
        return
    for key, row, kernels in shown:
        details = [detail(key, kernels) for detail in DETAILS]
        print_device(key, row, len(kernels), [line for line in details if line is not None])
