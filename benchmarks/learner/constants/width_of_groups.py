"""Are the widths of `GROUPS` better than others where they were not chosen?

    python benchmarks/learner/constants/width_of_groups.py SHEETS --traces FOLDER [--rows 400]

All published rows took part in the choice of the widths. Here the architectures of a sheet are
halved. On one half a factor on all widths is chosen, by errors of the prior alone on a fifth of its
architectures held out; on the other half it is judged in the same way, beside the shipped widths
(a factor of 1) and beside the factor that would have been best there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from benchmarks.learner.step_time import SOURCES, Labels, errors, held_out, load
from trappm.learner.physics import step_time_prior
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.kernel_times import spreads
from trappm.learner.physics.step_time_prior import StepTimePrior

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)


@contextmanager
def widened(factor: float) -> Iterator[None]:
    """Fits in this context begin with widths that are so many times the shipped ones."""

    def wider(tightness: float) -> Tensor:
        return factor * spreads(tightness)

    step_time_prior.spreads = wider  # type: ignore[attr-defined]
    try:
        yield
    finally:
        step_time_prior.spreads = spreads  # type: ignore[attr-defined]


def mape(labels: Labels, half: npt.NDArray[np.bool_], seed: int, factor: float) -> float:
    """Of the prior alone, in percent, on a fifth of the architectures of this half (n)."""
    test = np.zeros(len(half), dtype=bool)
    test[half] = held_out(labels.groups("architectures")[half], seed)

    def rows(chosen: npt.NDArray[np.bool_]) -> tuple[list[int], npt.NDArray[np.float64]]:
        return np.flatnonzero(chosen).tolist(), labels.step_time_ms[chosen]

    learned, values = rows(half & ~test)
    judged, measured = rows(test)
    with widened(factor):
        prior = StepTimePrior(spec_of("rtx3090")).refit(
            [labels.workloads[i] for i in learned], np.log(values)
        )
    return errors(measured, prior.log_values([labels.workloads[i] for i in judged]))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--labels", choices=SOURCES, default="train")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337])
    given = parser.parse_args()
    labels = load(SOURCES[given.labels], given.data, given.traces, given.rows)
    names = labels.groups("architectures")
    print(
        f"{len(names)} rows of {given.labels}; MAPE of the prior alone, %, by factor on all widths"
    )
    print(f"{'':>16}" + "".join(f"{factor:8.1f}" for factor in FACTORS) + "  chosen here, there")
    for seed in given.seeds:
        distinct = np.random.default_rng(seed).permutation(np.unique(names))
        first = np.isin(names, distinct[: len(distinct) // 2])
        tables = [[mape(labels, half, seed, f) for f in FACTORS] for half in (first, ~first)]
        best = [int(np.argmin(table)) for table in tables]
        for number, table in enumerate(tables):
            other = tables[1 - number]
            print(
                f"{seed}, half {number + 1:<5}"
                + "".join(f"{value:8.2f}" for value in table)
                + f"  {FACTORS[best[number]]:.1f}: {other[best[number]]:.2f} on the other half, "
                f"shipped {other[FACTORS.index(1.0)]:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
