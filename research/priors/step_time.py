"""How far the simulated step time is off, on labels that others published.

    PYTHONPATH=. python research/priors/step_time.py DATA --traces FOLDER [--labels train]
        [--split ...]
    PYTHONPATH=. python research/priors/step_time.py DATA --traces FOLDER --transfer

Kernels are traced once and kept in FOLDER, so that an interrupted run goes on. Each seed holds a
fifth of the architectures out (or of the families) and says the mean and median absolute
percentage error there. With --head the whole head is judged, residual and interval included,
beside the prior alone. Results: docs/studies/step_time_constants.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from trappm.learner.estimator import Estimate, Targets
from trappm.learner.heads.metric_head import Head, Ours
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.prior import TRANSFER_TIGHTNESS, Prior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.stats.folds import content_groups
from trappm.learner.workload import Workload
from trappm.profiler.errors import TrappmError
from trappm.profiler.models.families import family_of
from trappm.profiler.models.zoo import current_name
from trappm.profiler.records import Graph, MemoryFormat, Optimizer, Phase, Precision
from trappm.profiler.simulation.kernel_profile import KernelProfile
from trappm.profiler.static_profile import kernel_profile

Array = npt.NDArray[np.float64]

SEEDS = (1337, 1338, 1339, 1340, 1341)
HELD_OUT = 0.2
TRANSFER_LABELS = (0, 10, 32, 100, 300)


@dataclass(frozen=True)
class Source:
    """A file of timm's own benchmark results: SGD with Nesterov momentum, autocast to fp16."""

    file: str
    device: str
    phase: Phase
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    fused_attention: bool = True
    """PyTorch 1.12 has no fused attention, 2.4 has."""


SOURCES = {
    "train": Source(
        "rtx3090_train_step_amp_nchw.csv", "rtx3090", Phase.TRAIN, fused_attention=False
    ),
    "train-nhwc": Source(
        "rtx3090_train_step_amp_nhwc.csv",
        "rtx3090",
        Phase.TRAIN,
        MemoryFormat.CHANNELS_LAST,
        fused_attention=False,
    ),
    "infer-3090": Source("rtx3090_infer_step_amp_nchw.csv", "rtx3090", Phase.INFER),
    "infer-4090": Source("rtx4090_infer_step_amp_nchw.csv", "rtx4090", Phase.INFER),
}


@dataclass(frozen=True, eq=False)
class Labels:
    """The rows of one file that can be simulated."""

    workloads: list[Workload]
    step_time_ms: Array
    architectures: npt.NDArray[np.str_]
    traced_s: list[float]
    """CPU seconds of the traces made now."""
    refused: list[str]

    def groups(self, split: str) -> npt.NDArray[np.str_]:
        """With whom each row is held out; architectures of the same kernels are one."""
        if split == "architectures":
            return architectures_of(self)[0]
        return np.array([family_of(name) for name in self.architectures.tolist()])

    @property
    def current_names(self) -> npt.NDArray[np.str_]:
        return np.array([current_name(name) for name in self.architectures.tolist()])


def architectures_of(*sheets: Labels) -> list[npt.NDArray[np.str_]]:
    """With whom the rows of each file are held out, in all of these files at once."""
    names = [name for labels in sheets for name in labels.current_names.tolist()]
    workloads = [workload for labels in sheets for workload in labels.workloads]
    ends = np.cumsum([len(labels.workloads) for labels in sheets])[:-1]
    return np.split(np.array(content_groups(names, workloads)), ends)


def load(source: Source, data: Path, traces: Path, most: int | None = None) -> Labels:
    """The labels of one file whose models timm can build and PyTorch trace today.

    Args:
        most: so many rows, drawn at random; by default all.
    """
    attention = "fused" if source.fused_attention else "unfused"
    folder = traces / f"{source.memory_format}-{attention}"
    folder.mkdir(parents=True, exist_ok=True)
    sheet = pd.read_csv(data / source.file)
    if most is not None:
        sheet = sheet.iloc[np.random.default_rng(0).permutation(len(sheet))[:most]]
    phase = source.phase.value
    labels = Labels([], np.zeros(0), np.zeros(0, dtype=np.str_), [], [])
    times: list[float] = []
    names: list[str] = []
    for row in sheet.to_dict("records"):
        name, size = str(row["architecture"]), int(row[f"{phase}_img_size"])
        kernels = _kernels(source, name, size, folder, labels)
        if kernels is None:
            continue
        labels.workloads.append(
            Workload(
                graph=Graph.empty(int(row[f"{phase}_batch_size"])),
                precision=Precision.AMP_FP16,
                memory_format=source.memory_format,
                optimizer=Optimizer.MOMENTUM,
                phase=source.phase,
                kernels=kernels,
            )
        )
        times.append(float(row[f"{phase}_step_time"]))
        names.append(name)
    return Labels(
        labels.workloads, np.array(times), np.array(names), labels.traced_s, labels.refused
    )


def _kernels(
    source: Source, name: str, size: int, folder: Path, labels: Labels
) -> KernelProfile | None:
    path, refusal = folder / f"{name}@{size}", folder / f"{name}@{size}.refused"
    if path.exists():
        return KernelProfile.from_bytes(path.read_bytes())
    if not refusal.exists():
        begin = time.process_time()
        try:
            kernels = kernel_profile(
                name,
                size,
                precision=Precision.AMP_FP16,
                memory_format=source.memory_format,
                fused_attention=source.fused_attention,
            )
        except TrappmError as error:
            refusal.write_text(str(error))
        else:
            path.write_bytes(kernels.to_bytes())
            labels.traced_s.append(time.process_time() - begin)
            return kernels
    labels.refused.append(name)
    return None


def held_out(groups: npt.NDArray[np.str_], seed: int) -> npt.NDArray[np.bool_]:
    """Whole groups, a fifth of all rows or a few more."""
    generator = np.random.default_rng(seed)
    chosen: npt.NDArray[np.bool_] = np.zeros(len(groups), dtype=np.bool_)
    for group in generator.permutation(np.unique(groups)):
        if chosen.mean() < HELD_OUT:
            chosen |= groups == group
    return chosen


def errors(measured: Array, log_predicted: Array) -> tuple[float, float]:
    off = 100 * np.abs(np.exp(log_predicted) / measured - 1)
    return float(off.mean()), float(np.median(off))


def judge(
    labels: Labels, source: Source, split: str, seeds: tuple[int, ...], head: bool
) -> dict[str, object]:
    """The prior without labels, fitted, and if wanted the whole head, on what is held out."""
    start = StepTimePrior(spec_of(source.device))
    results: dict[str, list[tuple[float, float]]] = {"from the specification": [], "fitted": []}
    fit_s, covered = [], []
    for seed in seeds:
        test = held_out(labels.groups(split), seed)
        unseen = [w for w, t in zip(labels.workloads, test, strict=True) if t]
        measured = labels.step_time_ms[test]
        begin = time.process_time()
        if head:
            fitted_head = _head(labels, ~test, start, seed)
            fitted, estimate = fitted_head.prior, fitted_head.predict(unseen)
            results.setdefault("with residual", []).append(
                errors(measured, np.log(estimate.median))
            )
            covered.append(_coverage(measured, estimate))
        else:
            fitted = start.refit(*_labelled(labels, ~test))
        fit_s.append(time.process_time() - begin)
        for variant, prior in (("from the specification", start), ("fitted", fitted)):
            results[variant].append(errors(measured, prior.log_values(unseen)))
        _tell(seed, results)
    coverage = {"coverage": round(float(np.mean(covered)), 1)} if head else {}
    return {**_mean(results), **coverage, "fit_cpu_s": round(float(np.mean(fit_s)), 1)}


def _head(
    labels: Labels,
    chosen: npt.NDArray[np.bool_],
    prior: StepTimePrior,
    seed: int,
    start: Head[Prior] | None = None,
) -> Head[Prior]:
    """A head trained on these rows, its folds divided by architecture."""
    workloads, log_values = _labelled(labels, chosen)
    values = np.exp(log_values)
    groups = labels.groups("architectures")[chosen].tolist()
    targets = Targets(values, np.full(len(values), np.nan), groups)
    return Ours(prior).fit(workloads, targets, np.random.default_rng(seed), start)


def _coverage(measured: Array, estimate: Estimate) -> float:
    assert estimate.low is not None and estimate.high is not None  # noqa: PT018  (ours has both)
    return 100 * float(np.mean((estimate.low <= measured) & (measured <= estimate.high)))


def _tell(seed: int, results: dict[str, list[tuple[float, float]]]) -> None:
    last = {variant: [round(number, 2) for number in rows[-1]] for variant, rows in results.items()}
    print(json.dumps({"seed": seed, **last}), file=sys.stderr, flush=True)


def transfer(old: Labels, new: Labels, seeds: tuple[int, ...], head: bool) -> dict[str, object]:
    """From RTX 3090 to RTX 4090: constants of the old one refitted with k labels of the new one.

    Old labels of the architectures that are judged are not used either.
    """
    first, second = spec_of("rtx3090"), spec_of("rtx4090")
    results: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        of_old, names = architectures_of(old, new)
        test = held_out(names, seed)
        unseen = [w for w, t in zip(new.workloads, test, strict=True) if t]
        known = ~np.isin(of_old, names[test])
        source = StepTimePrior(first).refit(*_labelled(old, known))
        old_head = _head(old, known, StepTimePrior(first), seed) if head else None
        moved = StepTimePrior(second).started_from(source)
        order = np.random.default_rng(seed).permutation(np.flatnonzero(~test))
        for count in TRANSFER_LABELS:
            drawn = np.zeros(len(test), dtype=np.bool_)
            drawn[order[:count]] = True
            some = _labelled(new, drawn)
            for variant, prior in (
                ("from the old device", moved.refit(*some, tightness=TRANSFER_TIGHTNESS)),
                ("from the specification", StepTimePrior(second).refit(*some)),
            ):
                row = results.setdefault(f"{count} labels, {variant}", [])
                row.append(errors(new.step_time_ms[test], prior.log_values(unseen)))
            for variant, begin in (
                ("head from the old device", old_head),
                ("head from scratch", None),
            ):
                if head:
                    new_head = _head(new, drawn, StepTimePrior(second), seed, begin)
                    row = results.setdefault(f"{count} labels, {variant}", [])
                    median = new_head.predict(unseen).median
                    row.append(errors(new.step_time_ms[test], np.log(median)))
        _tell(seed, results)
    return _mean(results)


def _labelled(labels: Labels, chosen: npt.NDArray[np.bool_]) -> tuple[list[Workload], Array]:
    workloads = [w for w, c in zip(labels.workloads, chosen, strict=True) if c]
    return workloads, np.log(labels.step_time_ms[chosen])


def _mean(results: dict[str, list[tuple[float, float]]]) -> dict[str, object]:
    return {
        variant: {
            "mape": round(float(np.mean([mean for mean, _ in rows])), 2),
            "median": round(float(np.mean([median for _, median in rows])), 2),
        }
        for variant, rows in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with the labels")
    parser.add_argument("--traces", type=Path, required=True, help="where kernels are kept")
    parser.add_argument("--labels", choices=SOURCES, default="train")
    parser.add_argument("--split", choices=("architectures", "families"), default="architectures")
    parser.add_argument("--transfer", action="store_true", help="from RTX 3090 to 4090, inference")
    parser.add_argument("--head", action="store_true", help="judge residual and interval too")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    arguments = parser.parse_args()
    seeds = tuple(arguments.seeds)
    if arguments.transfer:
        old, new = (
            load(SOURCES[name], arguments.data, arguments.traces)
            for name in ("infer-3090", "infer-4090")
        )
        result = transfer(old, new, seeds, arguments.head)
    else:
        source = SOURCES[arguments.labels]
        labels = load(source, arguments.data, arguments.traces)
        result = {
            "rows": len(labels.workloads),
            "refused": labels.refused,
            **judge(labels, source, arguments.split, seeds, arguments.head),
        }
        if labels.traced_s:
            quantiles = np.quantile(labels.traced_s, [0.5, 0.95])
            result["trace_cpu_s_median_p95"] = quantiles.round(2).tolist()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
