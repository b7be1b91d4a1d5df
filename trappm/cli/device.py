"""`trappm device`: know a device by its kernels, which cost milliseconds each, and show it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli.options import AsJson, print_json
from trappm.profiler.kernels.characterising import BUDGET_S

if TYPE_CHECKING:
    from trappm.profiler.kernels.kernel_measurement import KernelMeasurement

app = typer.Typer(
    help="Know a device by its kernels: measure them, show what was found, read others'.",
    no_args_is_help=True,
    epilog="Example: trappm device characterise cpu-2t",
)

_Device = Annotated[str, typer.Argument(help="Its key, such as cpu-2t or a100.")]
_LONGEST_S = 3600.0
_SOURCES = ("neusight",)


@app.command(epilog="Example: trappm device characterise cpu-2t && trappm device show cpu-2t")
def characterise(
    device: _Device,
    seconds: Annotated[
        float, typer.Option(min=1, max=_LONGEST_S, help="For all kernels together.")
    ] = BUDGET_S,
    as_json: AsJson = False,
) -> None:
    """Time some 200 kernels on a device of this machine and keep them in the label store.

    A kernel that fails, or that the time did not suffice for, is told and kept as such; what was
    measured before an interruption is kept, too.
    """
    from trappm.profiler.kernels.characterising import Characteriser
    from trappm.profiler.kernels.command import Progress, report
    from trappm.store import Home, Store

    results: list[KernelMeasurement] = []
    progress, begin = Progress(), time.monotonic()

    def heard(result: KernelMeasurement, count: int) -> None:
        results.append(result)
        progress(result, count)

    # Opened before anything is measured: a store that cannot be written says so at once.
    with Store.open(Home.open().database_url) as store, Characteriser() as characteriser:
        try:
            characteriser.characterise(device, seconds=seconds, on_result=heard)
        finally:
            progress.end()
            store.kernels.record(results)
    report(device, results, time.monotonic() - begin, as_json=as_json)
    if not any(result.time_ms for result in results):
        raise typer.Exit(1)


@app.command(epilog="Example: trappm device show a100 --json")
def show(
    device: Annotated[
        str | None, typer.Argument(help="Its key; without one, all that are known are listed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a device reaches: compute by type, bandwidth by level, what a launch takes."""
    from trappm.label_frames import store_to_read
    from trappm.terminal.tables import print_table

    with store_to_read() as store:
        if device is None:
            known = store.kernels.devices()
            if as_json:
                print_json(known)
            else:
                print_table(
                    "devices of which kernels are known", ("device", "kernels"), [*known.items()]
                )
            return
        results = store.kernels.latest(device)
    _show(device, results, as_json=as_json)


def _show(device: str, results: list[KernelMeasurement], *, as_json: bool) -> None:
    from trappm.profiler.kernels.ceilings import ceilings, sentence
    from trappm.profiler.kernels.command import facts
    from trappm.profiler.records import Outcome
    from trappm.terminal.tables import print_table

    known = ceilings(results)
    environment = results[-1].environment
    newest = max(result.started_at for result in results)
    if as_json:
        provenances = sorted({result.provenance.value for result in results})
        more = {"device_name": environment.get("device_name"), "provenances": provenances}
        print_json({**facts(device, results, known), **more, "newest": newest})
        return
    typer.echo(f"{device} ({environment.get('device_name', 'unnamed')}): {sentence(known)}.")
    rows = [(f"compute in {kind}", value, "TFLOP/s") for kind, value in known.tflops.items()]
    rows += [(f"bandwidth in {b.level}", b.gb_s, "GB/s") for b in known.bandwidths]
    rows += [
        (name, value, "us")
        for name, value in (("one launch", known.launch_us), ("one of many", known.dispatch_us))
        if value is not None
    ]
    if rows:
        print_table("ceilings", ("of", "at best", "unit"), rows)
    counts = Counter((result.call.operator.value, result.outcome.value) for result in results)
    operators = sorted({operator for operator, _ in counts})
    print_table(
        "kernels",
        ("operator", "ok", "others"),
        [
            (
                operator,
                counts[operator, Outcome.OK.value],
                sum(n for (o, what), n in counts.items() if o == operator and what != Outcome.OK),
            )
            for operator in operators
        ],
    )


@app.command(name="import", epilog="Example: trappm device import kernels.csv.gz --source neusight")
def import_(
    file: Annotated[Path, typer.Argument(help="JSON lines of kernels, or a published table.")],
    source: Annotated[
        str | None, typer.Option(help=f"Of a published table: {', '.join(_SOURCES)}.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Record the kernels in a file; one bad row refuses it whole, and twice changes nothing."""
    from trappm.profiler.errors import InputError
    from trappm.store import Home, Store
    from trappm.store.exchange.files import checked_size
    from trappm.store.kernels.files import read_kernels
    from trappm.store.kernels.neusight import read_neusight

    if source not in (None, *_SOURCES):
        raise InputError(f"no source is named {source!r}; there are {', '.join(_SOURCES)}")
    read = read_kernels if source is None else read_neusight
    count = sum(1 for _ in read(checked_size(file)))  # all of it, before a store is made
    with Store.open(Home.open().database_url) as store:
        new = store.kernels.record_many(read(file))
    if as_json:
        print_json({"file": str(file), "source": source, "rows": count, "new": new})
    else:
        typer.echo(f"{file.name}: {count:,} kernels, {new:,} of them new")


@app.command(epilog="Example: trappm device export cpu-2t kernels.jsonl")
def export(
    device: _Device,
    file: Annotated[Path, typer.Argument(help="A file for JSON lines; replaced.")],
) -> None:
    """Write every attempt to time a kernel on a device into a file of JSON lines."""
    from trappm.label_frames import store_to_read
    from trappm.store.kernels.files import export_kernels

    with store_to_read() as store:
        store.kernels.latest(device)  # refuses a device of which nothing is known
        count = export_kernels(store.kernels.each(device=device), file)
    typer.echo(f"{count:,} kernels written to {file}")
