"""`python -m profiler measure resnet18 --batch-size 4 --device cpu-1t`: one measurement, no Ray.

For a GPU node that has torch and timm and nothing else of ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from profiler.devices import local_devices
from profiler.errors import TrappmError
from profiler.isolation import Measurer
from profiler.protocols import PROTOCOLS, protocol_named
from profiler.records import (
    Configuration,
    Measurement,
    MemoryFormat,
    Optimizer,
    Outcome,
    Phase,
    Precision,
    Provenance,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; exit status 0 for `ok`, 1 for any other outcome, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        configuration = Configuration(
            architecture=options.architecture,
            batch_size=options.batch_size,
            input_size=options.input_size,
            precision=options.precision,
            memory_format=options.memory_format,
            optimizer=options.optimizer,
            phase=options.phase,
        )
        protocol = protocol_named(options.protocol)
        with Measurer() as measurer:
            measurement = measurer.measure(configuration, options.device, protocol)
    except TrappmError as error:
        print(f"profiler: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("profiler: interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(measurement.to_dict()))
    elif measurement.outcome is not Outcome.UNSUPPORTED:
        print(_summary(measurement))
    if measurement.outcome is Outcome.UNSUPPORTED:
        print(f"profiler: {measurement.message}", file=sys.stderr)
        return 2
    return 0 if measurement.outcome is Outcome.OK else 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"profiler: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m profiler", description="Measures training steps.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    measure = commands.add_parser("measure", help="measure one configuration on this machine")
    measure.add_argument("architecture", help="a timm model name, such as resnet18")
    measure.add_argument("--batch-size", type=int, default=1)
    measure.add_argument("--input-size", type=int, default=224, help="pixels (default: 224)")
    measure.add_argument("--precision", choices=list(Precision), default=Precision.FP32)
    measure.add_argument(
        "--memory-format", choices=list(MemoryFormat), default=MemoryFormat.CONTIGUOUS
    )
    measure.add_argument("--optimizer", choices=list(Optimizer), default=Optimizer.SGD)
    measure.add_argument("--phase", choices=list(Phase), default=Phase.TRAIN)
    measure.add_argument(
        "--device", required=True, help=f"one of {', '.join(local_devices())}, or cuda:0"
    )
    measure.add_argument("--protocol", choices=list(PROTOCOLS), default="paper")
    measure.add_argument("--json", action="store_true", help="print the whole measurement as JSON")
    return parser


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
            told = measurement.missing.get(metric, "missing")
            lines.append(f"  {name:<9}  " + (told if value is None else f"{value:.1f} {unit}"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
