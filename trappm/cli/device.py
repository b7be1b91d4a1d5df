"""`trappm device`: know a device by its kernels, which cost milliseconds each, and show it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, print_json
from trappm.profiler.devices.rank_keys import rank_key

if TYPE_CHECKING:
    from trappm.profiler.kernels.kernel_measurement import KernelMeasurement

app = typer.Typer(
    help="Know a device by its kernels: measure them, show what was found, read others'.",
    no_args_is_help=True,
    epilog="Example: trappm device characterise cpu-2t",
)

_Device = Annotated[
    str,
    typer.Argument(
        metavar="DEVICE", help="Its key, such as cpu-2t or a100.", autocompletion=shell.devices
    ),
]
_LONGEST_S = 3600.0


@app.command(epilog="Example: trappm device characterise cpu-2t && trappm device show cpu-2t")
def characterise(
    device: _Device,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=_LONGEST_S, help="For all kernels; a minute.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines, appended, in place of the label store."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time some 200 kernels on a device of this machine and keep them in the label store.

    With --out, neither a database nor its libraries are needed.

    Of a device of several ranks, such as a100x4, the collectives between them: predictions with
    --gpus then know its links.

    A kernel that fails, or that the time did not suffice for, is told and kept as such; what was
    measured before an interruption is kept, too.
    """
    from trappm.profiler.kernels.characterising import BUDGET_S, Characteriser
    from trappm.terminal.kernel_report import Progress, report

    results: list[KernelMeasurement] = []
    progress, begin = Progress(), time.monotonic()

    # Opened before anything is measured, so that a file or store without write access fails first.
    with _recorder(out) as record, Characteriser() as characteriser:

        def on_result(result: KernelMeasurement, count: int) -> None:
            results.append(record(result))
            progress(result, count)

        try:
            characteriser.characterise(device, seconds=seconds or BUDGET_S, on_result=on_result)
        finally:
            progress.end()
    report(device, results, time.monotonic() - begin, as_json=as_json)
    if not as_json and rank_key(device).ranks > 1:
        from trappm.prediction.parallel.known_links import link_sentence

        typer.echo(link_sentence(device, results))
    if not any(result.time_ms for result in results):
        raise typer.Exit(1)


@contextlib.contextmanager
def _recorder(out: Path | None) -> Iterator[Callable[[KernelMeasurement], KernelMeasurement]]:
    """Open a file of JSON lines or the label store; yield what records one result in it."""
    if out is not None:
        from trappm.profiler.files.json_lines import JsonLines
        from trappm.profiler.kernels.kernel_measurement import KernelMeasurement

        with JsonLines(out, KernelMeasurement) as lines:

            def append(result: KernelMeasurement) -> KernelMeasurement:
                lines.append(result)
                return result

            yield append
        return
    from trappm.store import Home, Store
    from trappm.store.kernel_measurements import recordable

    results: list[KernelMeasurement] = []

    def keep(result: KernelMeasurement) -> KernelMeasurement:
        results.append(recordable(result))
        return results[-1]

    with Store.open(Home.open().database_url) as store:
        try:
            yield keep
        finally:
            store.kernels.record(results)


@app.command(name="import", epilog="Example: trappm device import kernels.jsonl")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines of kernels.")],
    as_json: AsJson = False,
) -> None:
    """Record the kernels in a file; one bad row refuses it whole, and twice changes nothing.

    NeuSight's published table: python -m research import FILE --source neusight
    """
    from trappm.store import Home, Store
    from trappm.store.files import checked_size
    from trappm.store.kernel_measurements import read_kernels

    count = sum(1 for _ in read_kernels(checked_size(file)))  # all of it, before a store is made
    with Store.open(Home.open().database_url) as store:
        new = store.kernels.record_many(read_kernels(file))
    if as_json:
        print_json({"file": str(file), "rows": count, "new": new})
    else:
        typer.echo(f"{file.name}: {count:,} kernels, {new:,} of them new")


@app.command(epilog="Example: trappm device export cpu-2t kernels.jsonl")
def export(
    device: _Device,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file for JSON lines; replaced.")],
) -> None:
    """Write every attempt to time a kernel on a device into a file of JSON lines."""
    from trappm.label_store import store_to_read
    from trappm.store.kernel_measurements import export_kernels

    with store_to_read() as store:
        store.kernels.latest(device)  # refuses a device of which nothing is known
        count = export_kernels(store.kernels.each(device=device), file)
    typer.echo(f"{count:,} kernels written to {file}")


def devices(
    snapshot: Annotated[
        str | None,
        typer.Option(
            help="An id, alias or folder; by default the device's latest, then default.",
            autocompletion=shell.snapshots,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the devices that can be answered for, and by what evidence.

    Example: trappm devices --json
    """
    from trappm.prediction.device_names import DeviceEvidence, answerable
    from trappm.prediction.kept_answers import kept_answers
    from trappm.prediction.snapshot_choice import snapshots_that_answer
    from trappm.terminal.device_tables import print_devices

    rows = kept_answers(
        {"devices": "all", "snapshot": snapshot},
        lambda: answerable(snapshots_that_answer(snapshot)),
        write=asdict,
        read=lambda row: DeviceEvidence(**row),
    )
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        print_devices(rows)
