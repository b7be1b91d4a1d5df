"""`python -m profiler measure resnet18 --batch-size 4 --device cpu-1t`: measures without Ray.

For a GPU node that has torch and timm and nothing else of ours. `--sweep LIST --out FILE` measures
a list (`sweep_list`) into a file of JSON lines, and goes on where it was stopped.
`python -m profiler devices` lists what this machine can measure on, `python -m profiler kernels`
knows one of them by its kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from trappm.profiler.devices import local_devices, local_failures, open_device
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.files.json_lines import JsonLines
from trappm.profiler.kernels import command as kernels
from trappm.profiler.kernels.characterising import BUDGET_S
from trappm.profiler.measuring.canary import Canary, CanaryDecision, CanaryPlan, CanaryReading
from trappm.profiler.measuring.isolation import Measurer
from trappm.profiler.measuring.protocols import PROTOCOLS, protocol_named
from trappm.profiler.measuring.sweep import Sweep
from trappm.profiler.measuring.sweep_list import read_configurations
from trappm.profiler.records import (
    Configuration,
    Measurement,
    MemoryFormat,
    Optimizer,
    Outcome,
    Phase,
    Precision,
    Provenance,
)

_LONGEST_S = 3600.0
Measure = Callable[[Configuration], Measurement]
_DOING = {
    "create": "the model is made",
    "warmup": "steps warm up",
    "measure": "steps are timed",
}
"""Parts of a measurement, for people."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; exit status 0 for `ok`, 1 for any other outcome, 2 for bad input.

    A sweep that came to its end has done its work, whatever the outcomes.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "devices":
            return _devices()
        if options.command == "kernels":
            return kernels.run(options.device, options.out, options.seconds, as_json=options.json)
        return _measure(options) if options.sweep is None else _sweep(options)
    except TrappmError as error:
        _tell(f"profiler: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        print("profiler: interrupted", file=sys.stderr)
        return 130


def _devices() -> int:
    """One line a device: key, name, memory; on standard error, one for each that fails."""
    failures = local_failures()
    for key in local_devices():
        try:
            facts = open_device(key).environment()
        except TrappmError as error:
            failures.append(str(error))
            continue
        memory_mib = facts.get("device_memory_mib", facts.get("host_memory_mib"))
        memory = "" if memory_mib is None else f"  {memory_mib / 1024:6.1f} GiB"
        print(f"{key:<20}{memory}  {facts.get('device_name')}", flush=True)
    for failure in failures:
        _tell(f"profiler: {failure}")
    return TrappmError.exit_status if failures else 0


def _measure(options: argparse.Namespace) -> int:
    if options.architecture is None:
        raise InputError("name an architecture to measure, or a list with --sweep")
    for name, value in (
        ("--out", options.out),
        ("--shuffle", options.shuffle),
        ("--canary", options.canary),
    ):
        if value is not None:
            raise InputError(f"{name} goes with --sweep only")
    configuration = Configuration(**{"batch_size": 1, "input_size": 224, **_settings(options)})
    protocol = protocol_named(options.protocol)
    begin = time.monotonic()

    def tell(doing: str) -> None:
        if sys.stderr.isatty():  # whoever looks on wants to know; a file wants the answer
            _tell(f"profiler: {time.monotonic() - begin:5.1f} s  {_DOING.get(doing, doing)}")

    tell(f"{configuration} on {options.device}; its process starts, then waits for the cores")
    with Measurer() as measurer:
        measurement = measurer.measure(configuration, options.device, protocol, on_phase=tell)
    if options.json:
        print(json.dumps(measurement.to_dict()))
    elif measurement.outcome is not Outcome.UNSUPPORTED:
        _print(_summary(measurement), sys.stdout)
    if measurement.outcome is Outcome.UNSUPPORTED:
        _tell(f"profiler: {measurement.message}")
        return 2
    return 0 if measurement.outcome is Outcome.OK else 1


def _sweep(options: argparse.Namespace) -> int:
    if options.out is None:
        raise InputError("a sweep needs a file for its results: --out FILE.jsonl")
    settings = _settings(options)
    if settings:
        raise InputError(f"{next(iter(settings))} is for the list to say, not beside --sweep")
    if options.retries < 0:
        raise InputError(f"--retries is {options.retries}; it must be 0 or more")
    if options.shuffle is not None and options.shuffle < 0:
        raise InputError(f"--shuffle is {options.shuffle}; a seed must be 0 or more")
    protocol = protocol_named(options.protocol)
    plan = None if options.canary is None else CanaryPlan(every_measurements=options.canary)
    environment = open_device(options.device).environment()  # a wrong key fails first
    configurations = read_configurations(options.sweep)
    if options.shuffle is not None:
        order = np.random.default_rng(options.shuffle).permutation(len(configurations))
        configurations = [configurations[i] for i in order]
    with JsonLines(options.out, Measurement) as results, Measurer() as measurer:
        sweep = Sweep(
            configurations, results, options.device, protocol, environment, retries=options.retries
        )
        if sweep.settled:
            _tell(
                f"profiler: {sweep.settled} of {len(configurations)} are settled already, "
                f"{sweep.measured} of them measured"
            )

        def measure(configuration: Configuration) -> Measurement:
            return measurer.measure(configuration, options.device, protocol)

        try:
            if plan is None:
                sweep.run(measure, _tell)
            else:
                path = options.out.with_name(options.out.name + ".canary")
                with JsonLines(path, CanaryReading) as readings:
                    sweep.run(_watched(measure, plan, readings, options.device), _tell)
        except (TrappmError, KeyboardInterrupt):
            _tell(
                f"profiler: stopped with {sweep.settled} of {len(configurations)} settled; "
                "the same command goes on from there"
            )
            raise
    _print_outcomes(sweep, len(configurations), as_json=options.json)
    return 0


def _print_outcomes(sweep: Sweep, configurations: int, *, as_json: bool) -> None:
    counts = {outcome.value: sweep.outcomes[outcome] for outcome in Outcome}
    if as_json:
        summary = {"configurations": configurations, "attempts": sweep.attempts}
        print(json.dumps({**summary, "outcomes": counts}))
        return
    print(f"{configurations} configurations in {sweep.attempts} attempts:")
    print("\n".join(f"  {name:<12} {count:>6}" for name, count in counts.items() if count))


def _watched(
    measure: Measure, plan: CanaryPlan, readings: JsonLines[CanaryReading], device_key: str
) -> Measure:
    """Measures as before, with a look at the canary where one is due, which may end it all."""
    canary = Canary(plan, measure, device_key, history=readings.earlier)

    def watched(configuration: Configuration) -> Measurement:
        while (reading := canary.check()) is not None:
            readings.append(reading)
            _tell(f"canary: {reading.decision}{f': {reading.message}' if reading.message else ''}")
            if reading.decision is CanaryDecision.STOP:
                raise TrappmError(f"this machine is no longer what it was: {reading.message}")
        return measure(configuration)

    return watched


def _tell(line: str) -> None:
    _print(line, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    """Prints lines, which a screen breaks between words only; a file gets them whole."""
    if stream.isatty():
        wrapper = textwrap.TextWrapper(
            shutil.get_terminal_size().columns,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        text = "\n".join(wrapper.fill(line) for line in text.splitlines())
    print(text, file=stream, flush=True)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration's settings on the command line."""
    names = [field.name for field in dataclasses.fields(Configuration)]
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"profiler: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=f"python -m {__package__}", description="Measures training steps.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    commands.add_parser("devices", help="list the devices of this machine")
    timing = commands.add_parser("kernels", help="know a device by its kernels, within a minute")
    timing.add_argument("--device", required=True, help=f"one of {', '.join(local_devices())}")
    timing.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, appended to")
    timing.add_argument(
        "--seconds",
        type=_seconds,
        default=BUDGET_S,
        help=f"for all kernels (default: {BUDGET_S:g})",
    )
    timing.add_argument("--json", action="store_true", help="print the answer as JSON")
    measure = commands.add_parser("measure", help="measure one configuration on this machine")
    measure.add_argument("architecture", nargs="?", help="a timm or hf: name, such as resnet18")
    measure.add_argument("--batch-size", type=int, help="default: 1")
    measure.add_argument(
        "--input-size", "--sequence-length", type=int, help="pixels, or tokens (default: 224)"
    )
    measure.add_argument("--precision", choices=list(Precision), help="default: fp32")
    measure.add_argument("--memory-format", choices=list(MemoryFormat), help="default: contiguous")
    measure.add_argument("--optimizer", choices=list(Optimizer), help="default: sgd")
    measure.add_argument("--phase", choices=list(Phase), help="default: train")
    measure.add_argument(
        "--device", required=True, help=f"one of {', '.join(local_devices())}, or cuda:0"
    )
    measure.add_argument("--protocol", choices=list(PROTOCOLS), default="paper")
    measure.add_argument("--json", action="store_true", help="print what was measured as JSON")
    measure.add_argument(
        "--sweep", type=Path, metavar="LIST", help="measure all of a list, YAML or JSON lines"
    )
    measure.add_argument(
        "--out", type=Path, metavar="FILE", help="of a sweep: JSON lines, appended to"
    )
    measure.add_argument(
        "--retries", type=int, default=2, help="of what a sweep finds unstable (default: 2)"
    )
    measure.add_argument(
        "--shuffle", type=int, metavar="SEED", help="measure the list in a random order"
    )
    measure.add_argument(
        "--canary",
        type=int,
        metavar="COUNT",
        help="measure a reference every COUNT of a sweep (into FILE.canary); stop when it drifts",
    )
    return parser


def _seconds(text: str) -> float:
    """Seconds above 0, an hour at most; argparse tells a ValueError."""
    seconds = float(text)
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(text)
    return seconds


def _summary(measurement: Measurement) -> str:
    lines = [f"{measurement.configuration} on {measurement.device}: {measurement.outcome}"]
    if measurement.provenance is not Provenance.MEASURED:
        lines[0] += f" ({measurement.provenance}, not measured here)"
    if measurement.message:
        lines.append(f"  {measurement.message}")
    if measurement.step is not None:
        step = measurement.step
        lines.append(
            f"  step time  {step.median_ms:.2f} ms (median of {len(measurement.step_samples_ms)}, "
            f"interquartile range {step.iqr_ms:.2f} ms, 95th percentile {step.p95_ms:.2f} ms)"
        )
        if step.forward_share is not None:
            lines.append(
                f"  of it      {step.forward_share:.0%} forward, {step.backward_share:.0%} "
                f"backward, {step.optimizer_share:.0%} optimizer"
            )
        lines.append(f"  rate       {measurement.samples_per_second:.1f} samples a second")
        for name, value, unit in (
            ("memory", measurement.memory_mib, "MiB"),
            ("power", measurement.power_w, "W"),
        ):
            metric = f"{name}_{'mib' if name == 'memory' else 'w'}"
            reason = measurement.missing.get(metric, "missing")
            lines.append(f"  {name:<9}  " + (reason if value is None else f"{value:.1f} {unit}"))
        lines += _ranks(measurement)
    return "\n".join(lines)


def _ranks(measurement: Measurement) -> list[str]:
    """A line on the ranks that took the step together; none of a device that is by itself."""
    facts = measurement.environment
    if "world_size" not in facts:
        return []
    line = f"  ranks      {facts['world_size']} by {facts['strategy']} over {facts['collectives']}"
    alone_ms = facts.get("rank_alone_ms")
    if alone_ms:
        line += (
            f", {min(alone_ms):.2f} to {max(alone_ms):.2f} ms alone "
            f"(straggler {facts['straggler_ratio']:.2f})"
        )
    return [line]


if __name__ == "__main__":
    sys.exit(main())
