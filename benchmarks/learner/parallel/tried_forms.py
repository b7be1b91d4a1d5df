"""Other forms of collectives and of steps between T4 nodes, which were tried and not kept.

    PYTHONPATH=. python benchmarks/learner/parallel/tried_forms.py ../shared/data

Collectives: all-reduces of `collectives.py`, each form fitted with priors as loose, judged on
series held out and on systems held out. Steps: placements of T4s held out, as in `steps.py`, with
another term beside the constants of the links.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.learner.parallel import collectives, steps
from benchmarks.learner.parallel.collectives import LARGE_BYTES, STIFFNESS, Series, percent
from trappm.learner.physics.parallel.links import Node, node_of
from trappm.learner.physics.parallel.schedules import SCATTER, expected_most, schedule
from trappm.learner.physics.parallel.step_work import Gradient, even_work
from trappm.learner.physics.parallel.strategy import Parallelism

Array = npt.NDArray[np.float64]
Constants = Mapping[str, float]
NVLINK_GBS, RAILS = 300.0, 4
PROTOCOLS = ("LL", "LL128", "Simple")
"""Of NCCL: from little latency and bandwidth to much of both."""
LEVEL_BYTES = 1 << 24
"""Where a bandwidth that grows with size is that of the data sheet's share."""
MOST_FITTED = 250
COMMON = {
    "nvlink latency_us": (30, 0.7), "pcie latency_us": (30, 0.7), "rdma latency_us": (30, 0.7),
    "rdma hop_us": (5, 1.0), "nvlink sharpness": (0.9, 0.4), "pcie sharpness": (0.9, 0.4),
    "rdma sharpness": (0.9, 0.4), "nvlink share": (0.6, 0.5), "pcie share": (0.6, 0.5),
    "a100 share": (0.4, 0.8), "h100 share": (0.6, 0.5),
}  # fmt: skip
"""Of every form: before any label, and how far labels may move it in the logarithm."""


def kind_of(each: Series) -> str:
    if each.nodes > 1:
        return "rdma"
    return "pcie" if "pairwise" in each.system and each.gpus > 2 else "nvlink"


def parts(each: Series, known: Constants, growth: float = 0.0) -> tuple[float, Array]:
    """Latency in ms, and how long the data moves (n)."""
    kind = kind_of(each)
    hops = known["rdma hop_us"] * log2(each.gpus) if kind == "rdma" else 0.0
    latency = (known[f"{kind} latency_us"] + hops) / 1e3
    _, gbs = collectives.INNER[each.system]
    if kind == "nvlink" and "pairwise" in each.system:
        gbs = collectives.PAIR_GBS
    share = known[f"{kind} share"] if kind != "rdma" else 0.0
    if kind == "rdma":
        within = each.gpus // each.nodes
        gbs = collectives.NETWORKS[each.system][1] * min(within, RAILS) / RAILS
        share = known[f"{each.system[:4]} share"]
    rate = gbs * share * (each.sizes / LEVEL_BYTES) ** growth
    if kind == "rdma" and each.gpus > each.nodes:
        rate = 1 / (1 / rate + 1 / (NVLINK_GBS * known["nvlink share"]))
    return latency, 2 * (each.gpus - 1) / each.gpus * each.sizes / (rate * 1e6)


def smooth(each: Series, known: Constants) -> Array:
    latency, moving = parts(each, known)
    power = known[f"{kind_of(each)} sharpness"]
    return (latency**power + moving**power) ** (1 / power)


def protocols(each: Series, known: Constants) -> Array:
    """The fastest of NCCL's three, each with its latency and its share of the bandwidth."""
    latency, moving = parts(each, known)
    hop = known.get(f"{kind_of(each)} hop", 0.0) * log2(each.gpus)
    each_ms = [
        latency * (1 + hop) * known[f"{name} latency"] + moving / known[f"{name} bandwidth"]
        for name in PROTOCOLS
    ]
    return np.min(each_ms, axis=0)


def growing(each: Series, known: Constants) -> Array:
    """Bandwidth is a power of size."""
    latency, moving = parts(each, known, known[f"{kind_of(each)} growth"])
    power = known[f"{kind_of(each)} sharpness"]
    return (latency**power + moving**power) ** (1 / power)


def pairs_apart(each: Series, known: Constants) -> Array:
    """Two GPUs of a node need no ring: a latency of their own."""
    latency, moving = parts(each, known)
    if each.gpus == 2 and each.nodes == 1:
        latency *= known["pair latency"]
    power = known[f"{kind_of(each)} sharpness"]
    return (latency**power + moving**power) ** (1 / power)


FORMS: dict[str, tuple[Callable[[Series, Constants], Array], dict[str, tuple[float, float]]]] = {
    "smooth transition (kept)": (smooth, COMMON),
    "protocols LL, LL128, Simple": (
        protocols,
        {
            **COMMON, "nvlink hop": (0.2, 1.0), "pcie hop": (0.2, 1.0),
            "LL latency": (0.3, 0.7), "LL128 latency": (0.6, 0.7), "Simple latency": (1.0, 0.01),
            "LL bandwidth": (0.25, 0.7), "LL128 bandwidth": (0.7, 0.5),
            "Simple bandwidth": (1.0, 0.01),
        },
    ),
    "bandwidth a power of size": (
        growing, {**COMMON, **{f"{kind} growth": (0.1, 1.0) for kind in ("nvlink", "pcie", "rdma")}}
    ),
    "pairs apart": (pairs_apart, {**COMMON, "pair latency": (0.5, 0.7)}),
}  # fmt: skip


def fitted(form: str, labels: Sequence[Series]) -> Constants:
    times, start = FORMS[form]
    centre = np.log([value for value, _ in start.values()])
    widths = np.array([width for _, width in start.values()])

    def residuals(logs: Array) -> Array:
        known = dict(zip(start, np.exp(logs).tolist(), strict=True))
        errors = [np.log(times(each, known) / each.times_ms) for each in labels]
        return np.concatenate([*errors, (logs - centre) / widths * STIFFNESS])

    best = least_squares(residuals, centre, loss="soft_l1", f_scale=0.1).x
    return dict(zip(start, np.exp(best).tolist(), strict=True))


def judge_collectives(labels: Sequence[Series]) -> None:
    print("| form | fitted, all / >= 1 MiB | series held out | systems held out |")
    print("|---|---|---|---|")
    for form, (times, _) in FORMS.items():
        whole, rows = fitted(form, labels), []
        for each in labels:
            others = fitted(form, [other for other in labels if other is not each])
            far = fitted(form, [other for other in labels if other.system != each.system])
            for known in (whole, others, far):
                errors = np.log(times(each, known) / each.times_ms)
                rows += [percent(errors), percent(errors[each.sizes >= LARGE_BYTES])]
        means = np.reshape(rows, (-1, 3, 2)).mean(0)
        cells = " | ".join(f"{small:.0f} / {large:.0f}" for small, large in means)
        print(f"| {form} | {cells} |", flush=True)


@dataclass(frozen=True)
class Term:
    """What is tried beside the constants of the links."""

    start: float = 0.0
    """Of its constant; 0 for none."""
    gpus: str = "even"
    """Whose number of GPUs counts: the mean of the nodes, or of the largest, or of the smallest."""
    overlap: bool = False
    """The constant is the share of the backward pass that hides communication."""
    half: tuple[str, ...] = ()
    """Models whose gradients are summed in 16 bits."""
    always: bool = False
    """Ranks wait for the slowest in every step, whatever they wait for links."""
    apart: bool = False
    """The constant is what hidden communication slows the passes by."""


TERMS = {
    "as kept": Term(),
    "GPUs of the largest node": Term(gpus="largest"),
    "GPUs of the smallest node": Term(gpus="smallest"),
    "communication slows kernels": Term(0.1, apart=True),
    "part of the backward pass hides": Term(0.5, overlap=True),
    "waiting in every step": Term(always=True),
    "ResNet-50's gradients in 16 bits": Term(half=("imagenet",)),
}


def with_term(rows: pd.DataFrame, node: Node, term: Term, constant: float) -> Array:
    times = []
    columns = rows[["model", "alone_ms", "n_gpus", "n_nodes", term.gpus]]
    for model, alone_ms, _, nodes, gpus in columns.itertuples(index=False):
        size = (2e6 if model in term.half else 4e6) * steps.MILLIONS[model]
        work = even_work(alone_ms, size)
        if term.overlap:
            hidden = min(constant, 1.0)
            later = (Gradient(g.size_bytes, 1 - hidden * (1 - g.ready)) for g in work.gradients)
            work = replace(work, gradients=tuple(later))
        step = schedule(work, Parallelism(gpus=int(gpus), nodes=int(nodes)), node)
        more_ms = constant * (step.communication_ms - step.exposed_ms) if term.apart else 0.0
        if term.always:
            more_ms = SCATTER * expected_most(int(gpus) * nodes) * alone_ms - step.waiting_ms
        times.append(step.step_ms + more_ms)
    return np.array(times)


def judge_term(rows: pd.DataFrame, term: Term) -> pd.DataFrame:
    """Models and errors in %, placements held out."""
    placements = np.random.default_rng(0).permutation(rows.placement.unique())
    half = rows.placement.isin(placements[::2])
    start, names = node_of("t4"), steps.FITTED
    errors = []
    for learned, judged in ((rows[half], rows[~half]), (rows[~half], rows[half])):
        chosen = learned.sample(MOST_FITTED, random_state=0)

        def moved(logs: Array) -> tuple[Node, float]:
            by = np.exp(logs)
            network = {n: getattr(start.network, n) * f for n, f in zip(names, by, strict=False)}
            inner = replace(start.inner, efficiency=start.inner.efficiency * by[len(names)])
            node = replace(start, inner=inner, network=replace(start.network, **network))
            return node, term.start * by[-1]

        def residuals(logs: Array, chosen: pd.DataFrame = chosen) -> Array:
            errors = np.log(with_term(chosen, *_with(moved(logs), term)) / chosen.step_ms)
            return np.concatenate([errors, steps.STIFFNESS * logs])

        best = least_squares(residuals, np.zeros(len(names) + 2), loss="soft_l1", max_nfev=12).x
        times = with_term(judged, *_with(moved(best), term))
        miss = 100 * np.abs(times / judged.step_ms.to_numpy() - 1)
        errors.append(judged[["model"]].assign(miss=miss))
    return pd.concat(errors)


def _with(known: tuple[Node, float], term: Term) -> tuple[Node, Term, float]:
    return known[0], term, known[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder of labels, with nodes/ in it")
    data = parser.parse_args().data
    judge_collectives([s for s in collectives.series(data) if s.collective == "all_reduce"])
    rows = steps.t4_steps(data / "nodes" / "adaptdl_ddp_steps_t4.csv")
    digits = [[int(digit) for digit in str(int(placement))] for placement in rows.placement]
    rows = rows.assign(
        even=-(-rows.n_gpus // rows.n_nodes),
        largest=[max(each) for each in digits],
        smallest=[min(each) for each in digits],
    )
    print("| T4, placements held out | mean, % | median, % | by model |\n|---|---|---|---|")
    for name, term in TERMS.items():
        judged = judge_term(rows, term)
        models = ", ".join(f"{m} {e:.1f}" for m, e in judged.groupby("model").miss.mean().items())
        print(f"| {name} | {judged.miss.mean():.1f} | {judged.miss.median():.1f} | {models} |")


if __name__ == "__main__":
    main()
