"""How much of a card's memory can be used before runs die, judged by labels that had no part in it.

    PYTHONPATH=. python benchmarks/learner/usable_share.py ../shared/data

The A100 sheet gave `USABLE_SHARE`. Here each half of its architectures chooses a share of its own,
and the other half judges both. The RTX 3090 sheet had no part: timm tried each model at 512 first
and at the next smaller batch size after each run that died, so the batch size of a row fits and the
one above does not. Memory is simulated, as before any label of a card; of a card with labels it is
nearer.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trappm.experiments.label_files import read_labels, read_usable
from trappm.experiments.labelled_workloads import Prepared
from trappm.experiments.workbench import opened_workbench
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.workload import Workload
from trappm.profiler.devices.capacity import USABLE_SHARE, memory_mib
from trappm.profiler.records import GraphTemplate, Pair

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.bool_]

SHARES = np.round(np.arange(0.80, 1.0001, 0.01), 2)
FIRST_BATCH_SIZE = 512
"""Where timm's benchmark began on the RTX 3090."""
SEED = 1337


def batch_size_above(batch_size: int) -> int:
    """The one that timm's benchmark had tried before: powers of two, and halfway between them."""
    power = 2 ** int(math.log2(batch_size))
    if batch_size == power:
        return max(batch_size + power // 2, batch_size + 1)
    return 2 * power


def balanced(used: Array, died: Rows, share: float) -> tuple[float, float, float]:
    """Of runs that died, and of those that fitted, which part is foretold; and their mean."""
    foretold = used > share
    recall, fitting = foretold[died].mean(), (~foretold)[~died].mean()
    return float(recall), float(fitting), float(recall + fitting) / 2


def best(used: Array, died: Rows) -> float:
    """The share that tells most; of equal ones that in the middle."""
    scores = np.array([balanced(used, died, share)[2] for share in SHARES])
    return float(np.median(SHARES[scores == scores.max()]))


def line(name: str, used: Array, died: Rows, share: float) -> None:
    recall, fitting, mean = balanced(used, died, share)
    print(
        f"{name:<34}{share:6.2f}{np.count_nonzero(died):7}{100 * recall:7.1f} %"
        f"{np.count_nonzero(~died):7}{100 * fitting:7.1f} %{100 * mean:7.1f} %"
    )


def simulated(workloads: Sequence[Workload], card: str) -> Array:
    return np.exp(MemoryPrior.on(spec_of(card)).log_values(workloads))


def on_a100(prepared: Prepared) -> None:
    samples = prepared.samples
    rows = np.flatnonzero(samples.judged | ~np.isnan(samples.above))
    died = ~np.isnan(samples.above[rows])
    workloads = samples.at(rows)
    logs = np.where(died, np.nan, np.log(samples.values[rows]))
    prior = MemoryPrior.on(spec_of("a100-40gb"))
    groups = np.array(samples.groups)[rows]
    drawn = np.random.default_rng(SEED).permutation(np.unique(groups))
    first = np.isin(groups, drawn[::2])
    for half, name in ((first, "one half"), (~first, "the other half")):
        own = np.flatnonzero(~half)
        fitted = prior.refit([workloads[i] for i in own], logs[own])
        used = np.exp(fitted.log_values(workloads)) / memory_mib("a100-40gb")
        share = best(used[~half], died[~half])
        line(f"A100, {name}: chosen on the others", used[half], died[half], share)
        line("  as shipped", used[half], died[half], USABLE_SHARE)


def on_rtx3090(prepared: Prepared, templates: Mapping[Pair, bytes]) -> None:
    fitting = prepared.samples.workloads
    larger = []
    for what, workload in zip(prepared.samples.configurations, fitting, strict=True):
        above = batch_size_above(what.batch_size)
        if above <= FIRST_BATCH_SIZE:
            template = GraphTemplate.from_bytes(templates[what.architecture, what.input_size])
            larger.append(replace(workload, graph=template.at(above)))
    used = np.concatenate([simulated(part, "rtx3090") for part in (fitting, larger)])
    died = np.arange(len(used)) >= len(fitting)
    used /= memory_mib("rtx3090")
    line("RTX 3090, as shipped", used, died, USABLE_SHARE)
    line("  the best in hindsight", used, died, best(used, died))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="the folder of published labels")
    data: Path = parser.parse_args().data
    print(f"{'':34}{'share':>6}{'died':>7}{'foretold':>9}{'fitted':>7}{'foretold':>9}{'mean':>9}")
    sheet = data / "a100_40gb_train_memory"
    usable = read_usable(sheet.with_name(f"{sheet.name}_quality.csv"))
    with opened_workbench("memory_mib", processes=1, watch=lambda *_: None, usable=usable) as bench:
        on_a100(bench.prepared(read_labels(sheet.with_suffix(".csv"))))
    with opened_workbench("step_time_ms", processes=1, watch=lambda *_: None) as bench:
        prepared = bench.prepared(read_labels(data / "rtx3090_train_step_amp_nchw.csv"))
        pairs = {(c.architecture, c.input_size) for c in prepared.samples.configurations}
        on_rtx3090(prepared, bench.store.workloads.graph_templates(sorted(pairs)))


if __name__ == "__main__":
    main()
