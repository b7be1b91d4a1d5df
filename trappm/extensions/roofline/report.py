"""Text and JSON reports of rooflines: summary, ceilings, and the largest kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trappm.extensions.roofline.drawing import MOST_POINTS, as_text, key_of_text
from trappm.extensions.roofline.roofs import BANDWIDTH, COMPUTE, LAUNCH, UNITS, KnownDevice
from trappm.profiler.kernels.ceilings import sentence as ceilings_sentence
from trappm.profiler.records import Outcome, Phase
from trappm.profiler.text import number_text
from trappm.reports.kernels import facts
from trappm.terminal.tables import print_line, print_table

if TYPE_CHECKING:
    from trappm.extensions.roofline.steps import RoofedStep

_ROWS = 10
"""Kernels in a table."""
_KINDS = {"compute": "compute in", "bandwidth": "bandwidth in", "launch": "launch"}


def sentence(step: RoofedStep, *, is_default: bool = False) -> str:
    """Describe what bounds the step, and the effect of doubling the batch, in two sentences.

    Args:
        step: A step of a model on a device.
        is_default: Whether the question named no device.
    """
    device = f"{step.device.key} (default)" if is_default else step.device.key
    shares = sorted(step.kernels.shares.items(), key=lambda item: -item[1])
    (most, share), *others = ((_WORDS[bound], value) for bound, value in shares)
    rest = ", ".join(f"{name} {value:.0%}" for name, value in others)
    what = "a training" if step.phase is Phase.TRAIN else "an inference"
    text = (
        f"{most.capitalize()} most bounds {what} step of {step.model} at batch "
        f"{step.batch_size:,} on {device}: {share:.0%} of "
        f"{number_text(step.step_time_ms, 3)} ms ({rest})."
    )
    if step.doubled is None:
        return f"{text} The batch size of the model is fixed."
    more = step.doubled.samples_per_s / step.samples_per_s - 1
    change = f"changes throughput by {more:+.0%}" if abs(more) >= _SAME else "keeps throughput"
    return (
        f"{text} Doubling the batch {change} (from {step.samples_per_s:,.0f} to "
        f"{step.doubled.samples_per_s:,.0f} samples/s)."
    )


_WORDS = {COMPUTE: "compute", BANDWIDTH: "bandwidth", LAUNCH: "launching"}
_SAME = 0.005


def to_json(step: RoofedStep) -> dict[str, Any]:
    """Return the step as JSON values, with its `MOST_POINTS` longest kernels."""
    points = [
        {**asdict(p), "intensity": p.intensity, "tflops": p.tflops}
        for p in step.kernels.points[:MOST_POINTS]
    ]
    return {
        "model": step.model,
        "phase": step.phase.value,
        "batch_size": step.batch_size,
        **{name: value.value for name, value in step.settings._asdict().items()},
        "step_time_ms": step.step_time_ms,
        "samples_per_s": step.samples_per_s,
        "source": step.source,
        "sentence": sentence(step),
        "shares": dict(step.kernels.shares),
        "doubled": None if step.doubled is None else asdict(step.doubled),
        "kernels": points,
        "left_out": max(0, len(step.kernels.points) - MOST_POINTS),
    }


def print_rooflines(
    devices: Sequence[KnownDevice], steps: Sequence[RoofedStep], *, is_default: bool = False
) -> None:
    """Print the ceilings of devices, and the step on each of them if given.

    Args:
        devices: Devices with their ceilings.
        steps: One step per device, or none.
        is_default: Whether the question named no device.
    """
    for step in steps:
        print_line(f"{sentence(step, is_default=is_default)} Times are based on {step.source}.")
    for device in devices:
        name = "" if device.name == device.key else f" ({device.name})"
        print_line(f"{device.key}{name}: {ceilings_text(device)}.")
    if any(device.of(COMPUTE) or device.of(BANDWIDTH) for device in devices):
        print_line(as_text(devices, steps))
        print_line(f"{key_of_text(devices, steps)}.")
    for device in devices:
        rows = [
            (f"{_KINDS[r.kind]} {r.of}", r.value, UNITS[r.kind], r.source) for r in device.roofs
        ]
        print_table(f"ceilings of {device.key}", ("of", "at best", "unit", "source"), rows)
    for step in steps:
        _print_kernels(step)
    for device in devices if not steps else ():
        _print_counts(device)


def devices_json(
    devices: Sequence[KnownDevice], steps: Sequence[RoofedStep]
) -> list[dict[str, Any]]:
    """Return ceilings and steps as JSON values, one entry per device."""
    rows = []
    for number, device in enumerate(devices):
        kernels = device.kernels
        row = facts(device.key, kernels, device.measured)
        row["device_name"] = device.name
        row["provenances"] = sorted({kernel.provenance.value for kernel in kernels})
        row["newest"] = max((kernel.started_at for kernel in kernels), default=None)
        row["roofs"] = [{**vars(roof), "unit": UNITS[roof.kind]} for roof in device.roofs]
        row["step"] = to_json(steps[number]) if steps else None
        rows.append(row)
    return rows


def ceilings_text(device: KnownDevice) -> str:
    """Describe the ceilings of a device."""
    if device.kernels:
        return ceilings_sentence(device.measured)
    values = ", ".join(
        f"{number_text(r.value)} {UNITS[r.kind]} {_KINDS[r.kind]} {r.of}" for r in device.roofs
    )
    return f"from its data sheet, since no kernels were measured: {values}"


def _print_kernels(step: RoofedStep) -> None:
    rows = [
        (p.name, p.size, p.count, f"{p.share:.1%}", p.bound, p.intensity, p.tflops)
        for p in step.kernels.points[:_ROWS]
    ]
    print_table(
        f"largest kernels on {step.device.key}",
        ("kernel", "size", "runs", "share", "bound", "FLOP/byte", "TFLOP/s"),
        rows,
    )


def _print_counts(device: KnownDevice) -> None:
    counts = Counter((k.call.operator.value, k.outcome is Outcome.OK) for k in device.kernels)
    operators = sorted({operator for operator, _ in counts})
    if operators:
        rows = [(o, counts[o, True], counts[o, False]) for o in operators]
        print_table(f"kernels of {device.key}", ("operator", "ok", "others"), rows)
