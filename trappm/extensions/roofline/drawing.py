"""Plots of a step under the rooflines of one or several devices, as text or as a PNG.

Both axes are logarithmic: FLOP per byte, and TFLOP/s. Slanted lines are bandwidths, horizontal
lines compute peaks. Points are the kernels of a step; tiny kernels far below all ceilings are drawn
at the edge of the plot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import atan2, ceil, degrees, log10
from math import floor as floor_of
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trappm.extensions.roofline.roofs import BANDWIDTH, COMPUTE, RooflineDevice
from trappm.profiler.records import number_text
from trappm.terminal.plots import new_figure, save_png

if TYPE_CHECKING:
    from trappm.extensions.roofline.steps import RooflineStep

MAX_POINTS = 400
"""Largest number of kernels per step that are drawn or written; enough for nearly all models."""

_COLUMNS, _LINES = 78, 24
_MIN_SPAN = (0.05, 1000.0)
"""Minimum range of the intensity axis in FLOP per byte."""
_MAX_POINT_AREA = 900.0
"""Area of a point that is the whole step, in square points."""
_MARKS = ("ox+*", "─═━┄")
_ROOM = 8.0
"""Ratio of the lowest ceiling to the lower edge of the plot."""
_SHOWN_SHARE = 0.002
"""Smallest share of the step time of a kernel that is drawn as text."""


class Line(NamedTuple):
    """Line of a ceiling; `ends` are (intensity, TFLOP/s)."""

    name: str
    ends: tuple[tuple[float, float], tuple[float, float]]


def lines(device: RooflineDevice, low: float, high: float) -> list[Line]:
    """Return the ceilings of a device between two intensities; equal ones are one line."""
    peaks, levels = [*device.of(COMPUTE).values()], [*device.of(BANDWIDTH).values()]
    top = max(roof.value for roof in peaks)
    steepest = max(roof.value for roof in levels)
    drawn = []
    for value, same in groupby(sorted(peaks, key=lambda r: r.value), key=lambda r: r.value):
        roofs = [*same]
        start = min(max(low, 1000 * value / steepest), high)
        name = f"{', '.join(roof.of for roof in roofs)} {number_text(value)} TFLOP/s"
        drawn.append(Line(name, ((start, value), (high, value))))
    for roof in levels:
        end = max(min(high, 1000 * top / roof.value), low)
        ends = (low, low * roof.value / 1000), (end, end * roof.value / 1000)
        drawn.append(Line(f"{roof.of} {number_text(roof.value)} GB/s", ends))
    return drawn


def span(steps: Sequence[RooflineStep]) -> tuple[float, float]:
    """Return the range of intensities of the plot in FLOP per byte."""
    intensities = [p.intensity for s in steps for p in s.kernels.points if p.share > _SHOWN_SHARE]
    low, high = _MIN_SPAN
    return min([low, *(0.7 * x for x in intensities)]), max([high, *(1.4 * x for x in intensities)])


def floor(devices: Sequence[RooflineDevice], low: float) -> float:
    """Return the lower edge of the plot in TFLOP/s, well below the lowest ceiling."""
    values = [roof.value for device in devices for roof in device.of(COMPUTE).values()]
    values += [r.value * low / 1000 for d in devices for r in d.of(BANDWIDTH).values()]
    return min(values) / _ROOM


def as_text(steps: Sequence[RooflineStep]) -> str:
    """Return the plot as text, 78 columns wide."""
    import plotext

    devices = [step.device for step in steps]
    low, high = span(steps)
    lowest_tflops = floor(devices, low)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(_COLUMNS, _LINES)
    plotext.xscale("log")
    plotext.yscale("log")
    for number, device in enumerate(devices):
        mark = _MARKS[1][number % len(_MARKS[1])]
        for line in lines(device, low, high):
            xs, ys = (
                np.geomspace(*ends, 2 * _COLUMNS).tolist() for ends in zip(*line.ends, strict=True)
            )
            plotext.plot(xs, ys, marker=mark)
    for number, step in enumerate(steps):
        shown = [p for p in step.kernels.points if p.share > _SHOWN_SHARE]
        ys = [max(p.tflops, lowest_tflops) for p in shown]
        mark = _MARKS[0][number % len(_MARKS[0])]
        plotext.scatter([p.intensity for p in shown], ys, marker=mark)
    most = max(end[1] for d in devices for line in lines(d, low, high) for end in line.ends)
    for axis, (first, last) in (
        (plotext.xticks, (low, high)),
        (plotext.yticks, (lowest_tflops, most)),
    ):
        ticks = [10.0**p for p in range(ceil(log10(first)), floor_of(log10(last)) + 1)]
        axis(ticks, [number_text(tick) for tick in ticks])
    plotext.xlabel("FLOP/byte")
    plotext.ylabel("TFLOP/s")
    text: str = plotext.uncolorize(plotext.build())
    return text


def key_of_text(steps: Sequence[RooflineStep]) -> str:
    """Return the legend of `as_text` in one line."""
    points, rules = _MARKS
    return "; ".join(
        f"{rules[number % len(rules)]} and {points[number % len(points)]} (a kernel): "
        f"{step.device.key}"
        for number, step in enumerate(steps)
    )


def draw_png(steps: Sequence[RooflineStep], path: Path) -> None:
    """Write the plot to a file; the area of a point is the kernel's share of the step.

    Raises:
        InputError: The file cannot be written.
    """
    devices = [step.device for step in steps]
    low, high = span(steps)
    lowest_tflops = floor(devices, low)
    figure = new_figure(9, 5.6)
    axis = figure.subplots()
    for number, device in enumerate(devices):
        colour = f"C{number}"
        for line in lines(device, low, high):
            (x0, y0), (x1, y1) = line.ends
            axis.plot([x0, x1], [y0, y1], color=colour, linewidth=1.3)
            is_level = y0 == y1
            axis.text(
                high * (low / high) ** (0.25 * number) if is_level else 1.15 * x0,
                y1 * 1.06 if is_level else 1.15 * y0 * 1.06, line.name,
                ha="right" if is_level else "left", va="bottom", fontsize=7.5, color=colour,
                rotation=0 if is_level else degrees(atan2(y1 - y0, x1 - x0)),
                rotation_mode="anchor", transform_rotates_text=not is_level,
            )  # fmt: skip
    for number, step in enumerate(steps):
        points = step.kernels.points[:MAX_POINTS]
        axis.scatter(
            [p.intensity for p in points], [max(p.tflops, lowest_tflops) for p in points],
            s=[3 + _MAX_POINT_AREA * p.share for p in points], color=f"C{number}", alpha=0.45,
            linewidths=0, clip_on=False,
        )  # fmt: skip
    axis.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(lowest_tflops, None),
        xlabel="FLOP/byte",
        ylabel="TFLOP/s",
    )
    handles = [axis.plot([], [], color=f"C{n}", label=d.key)[0] for n, d in enumerate(devices)]
    axis.legend(handles=handles, loc="lower right", frameon=False, fontsize=9)
    first = steps[0]
    axis.set_title(
        f"{first.model}, {first.phase} at batch {first.batch_size:,}, "
        f"{first.settings.precision}: kernels by their share of the step\n"
        "ceilings from data sheets",
        fontsize=9.5,
    )
    axis.grid(which="major", color="0.9", linewidth=0.6)
    save_png(figure, path, dpi=130)
