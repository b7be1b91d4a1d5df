"""What each group of the step time's constants is worth on labels not seen.

    PYTHONPATH=. python benchmarks/learner/ablation.py DATA --traces FOLDER [--seeds 1337 1338]
        [--groups NAME,NAME ...] [--cards CARD ...]

A group is left out by holding its constants where they begin. What it is worth is how much larger
the mean error is without it, in percentage points: on the RTX 3090's training steps with
architectures and with families held out, and in channels-last with architectures held out; on the
RTX 4090's inference, a whole device held out, by the constants of the 3090; and with 32 labels of
it. With `--cards` these are held out as a whole from all that is known (`other_devices.py`), and
their mean errors are printed. Results: docs/studies/step_time_constants.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from benchmarks.learner import step_time_nodes
from benchmarks.learner.other_devices import evidence_of_all, step_time_errors
from benchmarks.learner.step_time import (
    SOURCES,
    Labels,
    architectures_of,
    errors,
    held_out,
    load,
)
from trappm.learner.physics import kernel_times, step_time_prior
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.kernel_times import GROUPS, group_rows
from trappm.learner.physics.prior import TRANSFER_TIGHTNESS
from trappm.learner.physics.step_time_prior import StepTimePrior

HELD = 1e-3
"""Factor on the spreads of constants that are left out."""
FEW = 32
ROWS = 250
"""Of each sheet, drawn at random: fits take a second instead of three."""
COLUMNS = ("architectures", "families", "channels-last", "4090, 0 labels", f"4090, {FEW} labels")


@contextmanager
def without(names: Sequence[str]) -> Iterator[None]:
    """Fits in this context hold the constants of these groups."""
    every = kernel_times.spreads

    def held(tightness: float) -> Tensor:
        values = every(tightness)
        for group, rows in group_rows():
            if group.name in names:
                values[rows] *= HELD
        return values

    step_time_prior.spreads = step_time_nodes.spreads = held
    try:
        yield
    finally:
        step_time_prior.spreads = step_time_nodes.spreads = every


def fitted(
    prior: StepTimePrior, labels: Labels, rows: npt.NDArray[np.bool_], tightness: float = 1.0
) -> StepTimePrior:
    """The prior with constants of these rows (n)."""
    own = [labels.workloads[i] for i in np.flatnonzero(rows).tolist()]
    return prior.refit(own, np.log(labels.step_time_ms[rows]), tightness=tightness)


def off(prior: StepTimePrior, labels: Labels, rows: npt.NDArray[np.bool_]) -> float:
    """Mean absolute percentage error on these rows (n)."""
    own = [labels.workloads[i] for i in np.flatnonzero(rows).tolist()]
    return errors(labels.step_time_ms[rows], prior.log_values(own))[0]


def judge(
    train: Labels, last: Labels, old: Labels, new: Labels, seeds: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Mean errors in percent by `COLUMNS`, over seeds."""
    rows = []
    for seed in seeds:
        row = []
        for labels, split in (
            (train, "architectures"),
            (train, "families"),
            (last, "architectures"),
        ):
            test = held_out(labels.groups(split), seed)
            row.append(off(fitted(StepTimePrior(spec_of("rtx3090")), labels, ~test), labels, test))
        of_old, names = architectures_of(old, new)
        test = held_out(names, seed)
        known = ~np.isin(of_old, names[test])
        source = fitted(StepTimePrior(spec_of("rtx3090")), old, known)
        moved = StepTimePrior(spec_of("rtx4090")).started_from(source)
        row.append(off(moved, new, test))
        some = np.zeros(len(test), dtype=bool)
        some[np.random.default_rng(seed).permutation(np.flatnonzero(~test))[:FEW]] = True
        row.append(off(fitted(moved, new, some, TRANSFER_TIGHTNESS), new, test))
        rows.append(row)
    mean: npt.NDArray[np.float64] = np.mean(rows, axis=0)
    return mean


def print_cards(data: Path, traces: Path, cards: Sequence[str], ways: Sequence[list[str]]) -> None:
    """Prints what whole cards are off, with everything and without groups of constants."""
    known, kernels = evidence_of_all(data, traces)
    for names in ([], *ways):
        with without(names):
            rows = list(step_time_errors(known, kernels, cards))
        cells = (
            f"{row.device} {row.basis} {row.phase} {100 * np.abs(np.exp(-row.logs) - 1).mean():.1f}"
            for row in rows
        )
        print(f"without {'+'.join(names) or 'nothing'}: {', '.join(cells)}", flush=True)


def main() -> None:
    """Prints what all reach, then what each group is worth."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="the folder with the labels")
    parser.add_argument("--traces", type=Path, required=True, help="where kernels are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=(1337, 1338))
    parser.add_argument("--groups", nargs="+", help="names with commas leave groups out together")
    parser.add_argument("--cards", nargs="+", help="hold these out as a whole instead")
    options = parser.parse_args()
    every = [group.name for group in GROUPS if not group.common]
    ways = [names.split(",") for names in options.groups or every]
    if options.cards:
        print_cards(options.data, options.traces, options.cards, ways)
        return
    labels = [load(SOURCES[n], options.data, options.traces, ROWS)
              for n in ("train", "train-nhwc", "infer-3090", "infer-4090")]  # fmt: skip
    print(f"{'':46}" + "".join(f"{name:>17}" for name in COLUMNS), flush=True)
    everything = judge(*labels, options.seeds)
    print(f"{'all':46}" + "".join(f"{value:17.2f}" for value in everything), flush=True)
    for names in ways:
        with without(names):
            worth = judge(*labels, options.seeds) - everything
        count = sum(rows.stop - rows.start for g, rows in group_rows() if g.name in names)
        print(
            f"{'+'.join(names)[:40]:42}{count:4}" + "".join(f"{value:+17.2f}" for value in worth),
            flush=True,
        )


if __name__ == "__main__":
    main()
