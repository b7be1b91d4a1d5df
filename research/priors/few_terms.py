"""A step-time prior of 43 non-negative terms, judged against the shipped one of 511 constants
(docs/research/few_terms.md).

    step = sum_k exp(theta_k) * term_k
    terms: FLOPs of each kind of product by direction, bytes of each kind of kernel,
           bytes that stay in the cache, launches, dispatch, update, copies, a constant

The terms are in ms at the peaks of the data sheet, so `theta` is the logarithm of a slowdown. Both
priors begin with what the other cards teach: the 511 constants by `JointFit`, the 43 by one fit to
all other cards' steps and kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

import numpy as np
import pandas as pd
import torch
import typer

from research.data import data_folder
from research.held_out import Array, held_out
from research.priors.joint_fit import Evidence, SharedPrior
from research.priors.other_devices import all_evidence
from research.priors.step_time import IsHead, SeedCount, error_row, fit_head, groups_of
from research.priors.steps import TRACES, Steps, Traces, learned_from, timm_steps
from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.physics.kernel_terms import PASSES, PRODUCTS, STREAMS, terms_of
from trappm.learner.physics.kernel_times import COPY_RATE, STEP_MS
from trappm.learner.physics.prior import Prior, PriorSpec, TermPrior, fit_coefficients
from trappm.learner.workload import Workload
from trappm.profiler.simulation.kernel_profile import KernelKind

KINDS = [kind.name.lower() for kind in KernelKind]
NAMES = (
    *(f"{kind} flops {way}" for kind in KINDS[:PRODUCTS] for way in ("forward", "backward")),
    *(f"{kind} bytes" for kind in KINDS),
    "cached bytes", "reordered bytes", "product launches", "stream launches", "dispatch",
    "update bytes", "update launches", "copied bytes", "step",
)  # fmt: skip
COMMON_SPREAD = 0.3
CACHE_SPEEDUP = 4.0
"""Bandwidth of the last-level cache over that of memory, before labels; a round number."""
COUNTS, MOST_ROWS = (20, 50), 400


class FewTerms(TermPrior):
    """Sum of the terms for the device of a data sheet."""

    def __init__(
        self, device: DeviceSpec, spread: float, log_constants: Array | None = None
    ) -> None:
        spec = PriorSpec(dict.fromkeys(NAMES, spread), COMMON_SPREAD)
        super().__init__(spec, log_constants)
        self.device, self.spread = device, spread

    @property
    def feature_groups(self) -> tuple[int, ...]:
        return (1, len(NAMES))

    def with_constants(self, log_constants: Array) -> Self:
        return type(self)(self.device, self.spread, log_constants)

    def terms(self, workloads: Sequence[Workload]) -> Array:
        return terms_in_ms(workloads, self.device)

    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        features: Array = np.concatenate([logs[:, None], np.sqrt(shares)], axis=1)
        return features

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> Self:
        raise ValueError("tensors have no data sheet, so this prior cannot be read from them")


def terms_in_ms(workloads: Sequence[Workload], spec: DeviceSpec) -> Array:
    """Return the terms at the peaks of the data sheet, in ms, shape (n, 43)."""
    terms, count = terms_of(workloads, spec), len(workloads)
    products, streams = terms.products, terms.streams
    peaks = [spec.full_tflops, spec.half_tflops, spec.tf32_tflops or spec.full_tflops]
    rates = torch.tensor(peaks, dtype=torch.float64)[products.peak] * 1e9
    wasted = products.tiles.min(dim=1).values.exp()
    math = products.count * products.log_flops.exp() / rates * wasted
    per_byte = 1 / (spec.bandwidth_gbs * 1e6)
    moved = products.count * products.log_bytes.exp() * per_byte
    # The shares of the knots from the cache's size on are bytes of memory, the others of the cache.
    in_memory = streams.cache[:, 2:].sum(dim=1) + (streams.cache.sum(dim=1) == 0)
    streamed = streams.count * streams.log_bytes.exp() * per_byte

    def sums(owner: torch.Tensor, column: torch.Tensor, width: int, values: torch.Tensor) -> Array:
        flat = torch.zeros(count * width, dtype=torch.float64)
        added: Array = flat.index_add(0, owner * width + column, values).reshape(-1, width).numpy()
        return added

    kind, is_backward = products.base // PASSES, (products.base % PASSES > 0).long()
    zeros, other_zeros = torch.zeros_like(kind), torch.zeros_like(streams.kind)
    launch = spec.launch_us / 1e3
    dispatches = terms.dispatches.numpy()
    columns = [
        sums(products.owner, kind * 2 + is_backward, 2 * PRODUCTS, math),
        sums(products.owner, kind, PRODUCTS, moved),
        sums(streams.owner, streams.kind, STREAMS, streamed * in_memory),
        sums(streams.owner, other_zeros, 1, streamed * (1 - in_memory) / CACHE_SPEEDUP),
        sums(products.owner, zeros, 1, moved * products.reordered),
        sums(products.owner, zeros, 1, products.count * launch),
        sums(streams.owner, other_zeros, 1, streams.count * launch),
        (dispatches.sum(1) * terms.waits_for_host.numpy() * spec.dispatch_us / 1e4)[:, None],
        (terms.optimizer_bytes.numpy() * per_byte)[:, None],
        (dispatches[:, 2] * launch)[:, None],
        (terms.copied_bytes.numpy() / COPY_RATE)[:, None],
        (STEP_MS * terms.waits_for_host.numpy() + 1e-6)[:, None],
    ]
    return np.concatenate(columns, axis=1)


def pooled(evidence: Sequence[Evidence]) -> Array:
    """Return the log constants (43) that fit all cards best, by at most 400 rows per source."""
    rng = np.random.default_rng(0)
    parts = [
        e.at(np.isin(np.arange(len(e.workloads)), rng.permutation(len(e.workloads))[:MOST_ROWS]))
        for e in evidence
    ]
    terms = np.concatenate([FewTerms(e.spec, 1.0).terms(e.workloads) for e in parts])
    spec = PriorSpec(dict.fromkeys(NAMES, 1.0), 1.0)
    return fit_coefficients(terms, np.concatenate([e.log_values for e in parts]), spec)


def judged(
    steps: Steps, priors: dict[str, Prior], split: str, seeds: range, with_head: bool
) -> list[dict[str, object]]:
    """Return errors on held-out groups of one card after 20, 50 and all labels."""
    groups = groups_of(steps, split)
    rows = []
    for seed in seeds:
        test = held_out(groups, seed)
        unseen = steps.evidence.at(test)
        order = np.random.default_rng(seed).permutation(np.flatnonzero(~test))
        for count in (*COUNTS, len(order)):
            drawn = np.zeros(len(test), dtype=np.bool_)
            drawn[order[:count]] = True
            some = steps.evidence.at(drawn)
            label = str(count) if count in COUNTS else "all"
            for name, prior in priors.items():
                fitted = prior.refit(some.workloads, some.log_values)
                logs = {name: fitted.log_values(unseen.workloads)}
                if with_head:
                    head = fit_head(steps, drawn, prior, seed)
                    logs[f"{name}, head"] = np.log(head.predict(unseen.workloads).median)
                what = {"judged on": steps.evidence.device, "held out": split, "labels": label}
                measured = np.exp(unseen.log_values)
                rows += [what | error_row(seed, k, measured, v) for k, v in logs.items()]
    return rows


def main(
    traces: Traces = TRACES,
    head: IsHead = False,
    cards: Annotated[
        bool, typer.Option("--cards", help="Hold out each card as a whole, too (slow).")
    ] = False,
    seeds: SeedCount = 3,
) -> None:
    """Print mean and median errors of both priors on held-out families, architectures and cards."""
    known, kernels = all_evidence(data_folder(), traces)
    rows: list[dict[str, object]] = []
    devices = sorted({steps.evidence.device for steps in known}) if cards else []
    for device in {"rtx-3090": None, **dict.fromkeys(devices)}:
        steps = [s for s in known if s.evidence.device != device]
        others = [*(s.evidence for s in steps), *(e for e in kernels if e.device != device)]
        common = learned_from(others).of_another_device()
        centre, of_steps = pooled(others), pooled([part.evidence for part in steps])
        pair: dict[str, Prior] = {}
        for own in (s for s in known if s.evidence.device == device):
            spec = own.evidence.spec
            shipped = SharedPrior.like_others(spec, common)
            pair = {"511 constants": shipped}
            for spread in (0.3, 0.6):
                pair[f"{len(NAMES)} terms, spread {spread}"] = FewTerms(spec, spread, centre)
            without = {
                "511 constants": shipped,
                f"{len(NAMES)} terms, of steps": FewTerms(spec, 0.3, of_steps),
                f"{len(NAMES)} terms, of steps and kernels": FewTerms(spec, 0.3, centre),
            }
            for name, prior in without.items():
                for phase, logs in own.errors(prior).items():
                    what = f"{device} ({own.evidence.host}) {phase}"
                    errors = error_row(0, name, np.exp(logs), np.zeros(len(logs)))
                    rows.append(
                        {"judged on": what, "held out": "whole card", "labels": "none"} | errors
                    )
                    print(rows[-1], flush=True)
        if device == "rtx-3090":
            judged_steps = timm_steps("train", data_folder(), traces)
            for split in ("families", "architectures"):
                rows += judged(judged_steps, pair, split, range(1337, 1337 + seeds), head)
    keys = ["judged on", "held out", "labels", "variant"]
    print(
        pd.DataFrame(rows)
        .drop(columns="seed")
        .groupby(keys, sort=False)
        .mean()
        .round(2)
        .to_string()
    )
