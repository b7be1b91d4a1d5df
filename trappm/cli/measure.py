"""`trappm measure`: measure a training step on this machine.

Works without Ray and without a database, on a node that has only the core dependencies.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.records import (
    Execution,
    MemoryFormat,
    Optimizer,
    Outcome,
    Phase,
    Precision,
    Provenance,
)

if TYPE_CHECKING:
    from trappm.profiler.records import Configuration, Measurement

_PHASES = {
    "create": "creating the model",
    "warmup": "warming up",
    "measure": "timing steps",
}
"""Messages for the phases of a measurement."""


def measure(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A timm architecture, an hf: name, or your own package.module:function.",
            autocompletion=shell.models,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of this machine, such as cpu-2t, a100 or cuda:0.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step (default: 1).")] = None,
    input_size: Annotated[
        int | None,
        typer.Option("--input-size", "--sequence-length", help="Pixels or tokens (default: 224)."),
    ] = None,
    precision: Annotated[Precision | None, typer.Option(help="Precision (default: fp32).")] = None,
    memory_format: Annotated[
        MemoryFormat | None, typer.Option(help="Layout of images (default: contiguous).")
    ] = None,
    optimizer: Annotated[Optimizer | None, typer.Option(help="Optimizer (default: sgd).")] = None,
    phase: Annotated[Phase | None, typer.Option(help="Phase (default: train).")] = None,
    is_compiled: Annotated[
        bool, typer.Option("--compile", help="Measure the step under torch.compile.")
    ] = False,
    protocol: Annotated[str, typer.Option(help="Measurement protocol.")] = "paper",
    show_devices: Annotated[
        bool, typer.Option("--devices", help="List the devices of this machine and exit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a training step on this machine.

    The exit status is 0 for the outcome ok, 1 for any other, and 2 for bad input.

    Example: trappm measure resnet18 --device cpu-2t --batch-size 4
    """
    from trappm.profiler.models.own_modules import with_version
    from trappm.profiler.records import Configuration, protocol_named

    if show_devices:
        _show_devices()
        return
    if device is None:
        raise InputError("name a device with --device; list those of this machine with --devices")
    settings: dict[str, Any] = {
        "architecture": model,
        "batch_size": batch_size,
        "input_size": input_size,
        "precision": precision,
        "memory_format": memory_format,
        "optimizer": optimizer,
        "phase": phase,
        "execution": Execution.COMPILE if is_compiled else None,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if model is None:
        raise InputError("name an architecture to measure; trappm campaign launch measures lists")
    settings["architecture"] = with_version(model)
    configuration = Configuration(**{"batch_size": 1, "input_size": 224, **settings})
    if configuration.phase is Phase.TRAIN:
        configuration.optimizer.require_library()
    measurement = _measure_one(configuration, device, protocol_named(protocol))
    if measurement.outcome is Outcome.UNSUPPORTED and not as_json:
        raise InputError(f"{measurement.message}")
    if as_json:
        typer.echo(json.dumps(measurement.to_dict()))
    else:
        typer.echo(summary(measurement))
    if measurement.outcome is not Outcome.OK:
        raise typer.Exit(2 if measurement.outcome is Outcome.UNSUPPORTED else 1)


def _show_devices() -> None:
    """Print key, memory and name of each device; exit with 1 if one of them fails."""
    from trappm.profiler.devices import local_devices, local_failures, open_device

    failures = local_failures()
    for key in local_devices():
        try:
            facts = open_device(key).environment()
        except TrappmError as error:
            failures.append(str(error))
            continue
        memory_mib = facts.get("device_memory_mib", facts.get("host_memory_mib"))
        memory = "" if memory_mib is None else f"  {memory_mib / 1024:6.1f} GiB"
        typer.echo(f"{key:<20}{memory}  {facts.get('device_name')}")
    for failure in failures:
        typer.echo(failure, err=True)
    if failures:
        raise typer.Exit(1)


def _measure_one(configuration: Configuration, device: str, protocol: Any) -> Measurement:
    """Measure one configuration; a terminal shows the phases as they begin."""
    from trappm.profiler.measuring.isolation import Measurer

    begin = time.monotonic()

    def show(phase: str) -> None:
        if sys.stderr.isatty():
            seconds = time.monotonic() - begin
            typer.echo(f"{seconds:5.1f} s  {_PHASES.get(phase, phase)}", err=True)

    show(f"{configuration} on {device}: starting its process")
    with Measurer() as measurer:
        return measurer.measure(configuration, device, protocol, on_phase=show)


def summary(measurement: Measurement) -> str:
    """Return outcome, step time, rate, memory and power of a measurement as lines of text."""
    lines = [f"{measurement.configuration} on {measurement.device}: {measurement.outcome}"]
    if measurement.provenance is not Provenance.MEASURED:
        lines[0] += f" ({measurement.provenance}, not measured here)"
    if measurement.message:
        lines.append(f"  {measurement.message}")
    step = measurement.step
    if step is None:
        return "\n".join(lines)
    lines.append(
        f"  step time  {step.median_ms:.2f} ms (median of {len(measurement.step_samples_ms)}, "
        f"interquartile range {step.iqr_ms:.2f} ms, 95th percentile {step.p95_ms:.2f} ms)"
    )
    if step.forward_share is not None:
        lines.append(
            f"  shares     {step.forward_share:.0%} forward, {step.backward_share:.0%} "
            f"backward, {step.optimizer_share:.0%} optimizer"
        )
    lines.append(f"  throughput {measurement.samples_per_second:.1f} samples/s")
    for name, metric, value, unit in (
        ("memory", "memory_mib", measurement.memory_mib, "MiB"),
        ("power", "power_w", measurement.power_w, "W"),
    ):
        reason = measurement.missing.get(metric, "missing")
        lines.append(f"  {name:<9}  " + (reason if value is None else f"{value:.1f} {unit}"))
    facts = measurement.environment
    if "world_size" in facts:
        line = f"  ranks      {facts['world_size']} by {facts['strategy']}"
        line += f" over {facts['collectives']}"
        if alone_ms := facts.get("rank_alone_ms"):
            line += f", {min(alone_ms):.2f} to {max(alone_ms):.2f} ms alone"
            line += f" (straggler {facts['straggler_ratio']:.2f})"
        lines.append(line)
    return "\n".join(lines)
