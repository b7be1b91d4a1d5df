"""`trappm devices`: which devices are predicted, what is known of them, and measuring one."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import options, shell
from trappm.cli.options import AsJson, print_json
from trappm.profiler.devices.rank_keys import rank_key

if TYPE_CHECKING:
    from trappm.profiler.kernels.kernel_measurement import KernelMeasurement

app = typer.Typer(
    help="List devices, show what is known of them, and time kernels on one.",
    no_args_is_help=True,
    epilog="Example: trappm devices list",
)
_LONGEST_S = 3600.0


@app.command("list", epilog="Example: trappm devices list --json")
def list_devices(snapshot: options.SnapshotName = None, as_json: AsJson = False) -> None:
    """List the devices that are predicted, and the evidence for each metric."""
    from trappm.prediction.device_names import devices
    from trappm.terminal.device_tables import print_devices

    rows = devices(snapshot)
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        print_devices(rows)


@app.command(epilog="Example: trappm devices show v100 a100")
def show(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DEVICE", help="Devices by any of their names.", autocompletion=shell.devices
        ),
    ],
    snapshot: options.SnapshotName = None,
    as_json: AsJson = False,
) -> None:
    """Show the memory of devices, the evidence for each metric, and the number of timed kernels."""
    from trappm.label_frames import store_or_none_yet
    from trappm.prediction.device_names import devices, key_among
    from trappm.prediction.snapshot_choice import manifests_that_answer
    from trappm.store import Home
    from trappm.terminal.device_tables import print_device

    manifests = manifests_that_answer(snapshot)
    keys = [key_among(manifests, name) for name in names]
    known = {row.device: row for row in devices(snapshot)}
    with store_or_none_yet(Home.find()) as store:
        kernels = store.kernels.devices()
    rows = [{**asdict(known[key]), "timed_kernels": kernels.get(key, 0)} for key in keys]
    if as_json:
        print_json(rows)
        return
    for key in keys:
        print_device(known[key], kernels.get(key, 0))


@app.command(epilog="Example: trappm devices characterise cpu-2t && trappm devices show cpu-2t")
def characterise(
    device: Annotated[
        str,
        typer.Argument(
            metavar="DEVICE",
            help="Device key, such as cpu-2t or a100.",
            autocompletion=shell.devices,
        ),
    ],
    seconds: Annotated[
        float | None,
        typer.Option(min=1, max=_LONGEST_S, help="Time for all kernels in seconds (default: 60)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time some 200 kernels on a device of this machine and record them in the label store.

    A device with several ranks, such as a100x4, has the collectives between them timed; `trappm
    scale` then knows its links. Kernels that fail or get no time are recorded as such. Results
    before an interruption are kept.
    """
    from trappm.profiler.kernels.characterising import BUDGET_S, Characteriser
    from trappm.profiler.kernels.command import Progress, report
    from trappm.store import Home, Store
    from trappm.store.kernels.measurements import recordable

    results: list[KernelMeasurement] = []
    progress, begin = Progress(), time.monotonic()

    def record(result: KernelMeasurement, count: int) -> None:
        results.append(recordable(result))
        progress(result, count)

    # Opened before anything is measured: a store that cannot be written fails at once.
    with Store.open(Home.open().database_url) as store, Characteriser() as characteriser:
        try:
            characteriser.characterise(device, seconds=seconds or BUDGET_S, on_result=record)
        finally:
            progress.end()
            store.kernels.record(results)
    report(device, results, time.monotonic() - begin, as_json=as_json)
    if not as_json and rank_key(device).ranks > 1:
        from trappm.prediction.parallel.known_links import link_sentence

        typer.echo(link_sentence(device, results))
    if not any(result.time_ms for result in results):
        raise typer.Exit(1)
