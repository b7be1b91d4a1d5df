"""Text and JSON reports of rooflines: summary, ceilings, and the largest kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trappm.extensions.roofline.drawing import MAX_POINTS, as_text, key_of_text
from trappm.extensions.roofline.roofs import BANDWIDTH, COMPUTE, LAUNCH, UNITS
from trappm.profiler.records import Phase, number_text
from trappm.terminal.tables import print_line, print_table

if TYPE_CHECKING:
    from trappm.extensions.roofline.steps import RooflineStep

_ROWS = 10
"""Kernels in a table."""
_KINDS = {"compute": "compute in", "bandwidth": "bandwidth in"}


def describe(step: RooflineStep, *, is_default: bool = False) -> str:
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


def _step_json(step: RooflineStep) -> dict[str, Any]:
    """Return the step as JSON values, with its `MAX_POINTS` longest kernels."""
    points = [
        {**asdict(p), "intensity": p.intensity, "tflops": p.tflops}
        for p in step.kernels.points[:MAX_POINTS]
    ]
    return {
        "model": step.model,
        "phase": step.phase.value,
        "batch_size": step.batch_size,
        **{name: value.value for name, value in step.settings._asdict().items()},
        "step_time_ms": step.step_time_ms,
        "samples_per_s": step.samples_per_s,
        "source": step.source,
        "sentence": describe(step),
        "shares": dict(step.kernels.shares),
        "doubled": None if step.doubled is None else asdict(step.doubled),
        "kernels": points,
        "left_out": max(0, len(step.kernels.points) - MAX_POINTS),
    }


def print_rooflines(steps: Sequence[RooflineStep], *, is_default: bool = False) -> None:
    """Print what bounds the step on each device, the ceilings, and the largest kernels.

    Args:
        steps: The step on each device.
        is_default: Whether the question named no device.
    """
    for step in steps:
        print_line(f"{describe(step, is_default=is_default)} Times are based on {step.source}.")
    print_line(as_text(steps))
    print_line(f"{key_of_text(steps)}.")
    for device in [step.device for step in steps]:
        rows = [(f"{_KINDS[r.kind]} {r.of}", r.value, UNITS[r.kind]) for r in device.roofs]
        print_table(f"data sheet of {device.key}", ("of", "at best", "unit"), rows)
    for step in steps:
        _print_kernels(step)


def rooflines_json(steps: Sequence[RooflineStep]) -> list[dict[str, Any]]:
    """Return ceilings and steps as JSON values, one entry per device."""
    return [
        {
            "device": step.device.key,
            "roofs": [{**vars(roof), "unit": UNITS[roof.kind]} for roof in step.device.roofs],
            "step": _step_json(step),
        }
        for step in steps
    ]


def _print_kernels(step: RooflineStep) -> None:
    rows = [
        (p.name, p.size, p.count, f"{p.share:.1%}", p.bound, p.intensity, p.tflops)
        for p in step.kernels.points[:_ROWS]
    ]
    print_table(
        f"largest kernels on {step.device.key}",
        ("kernel", "size", "runs", "share", "bound", "FLOP/byte", "TFLOP/s"),
        rows,
    )
