"""How far off answers are for a card that nobody has labelled, and what the snapshot ships of it.

    PYTHONPATH=. python research/priors/other_devices.py ../shared/data --traces FOLDER [--write]
    PYTHONPATH=. python research/priors/other_devices.py ../shared/data --only memory [--write]

Each card with labels is held out as a whole: its step times are predicted from its data sheet and
the other cards' labels, and once more with kernels of its own, where somebody timed some; then, by
architectures held out, from its own steps and all others'. Memory is predicted for an A100
(GPUMemNet, software of 2023) and an H100 (our own labels) from simulated steps alone; static
profiles that are missing are made and kept in TRAPPM_HOME. With --write all cards' labels go into
`learner/physics/devices/`, with the quantiles of these errors; with `--only memory` those of memory
take the place of the old ones, and the rest of the file stays.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from research.evaluation.label_files import read_labels, read_usable
from research.evaluation.workbench import opened_workbench
from research.priors import step_time
from research.priors.card_errors import errors_of_devices, pooled_errors
from research.priors.step_time_nodes import (
    KERNEL_CARDS,
    NVIDIA,
    SHARE_OF_OTHERS,
    Steps,
    device_of,
    judge_v100,
    learned_from,
    medians,
    nvidia_steps,
    published_kernels,
    published_steps,
    timm_steps,
    traced,
)
from research.snapshot.shipped_sheets import SHEETS
from trappm.learner.heads.other_devices import (
    FILE,
    OTHERS,
    Basis,
    OtherDevices,
    known_of_others,
    write,
)
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.devices.joint_fit import Evidence
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.stats.calibration import Calibration
from trappm.learner.stats.folds import grouped_folds
from trappm.profiler.records import Measurement, MemoryFormat, Outcome, Phase
from trappm.profiler.simulation.training_loop import Loop

Array = npt.NDArray[np.float64]
Usable = Mapping[tuple[str, int], bool] | None

INFER_STEPS = 120
OTHER_KERNEL_CARDS = ("v100-pcie-32gb", "t4", "h100-sxm-80gb")
FOLDS = 4
"""Of architectures, by which cards with steps are judged."""
STEP_MS, MEMORY = "step time", "memory"


@dataclass(frozen=True, eq=False)
class Errors:
    """log(measured / predicted) of one card, held out as a whole."""

    metric: str
    device: str
    basis: Basis
    phase: Phase
    logs: Array
    architectures: Sequence[str] = ()
    """Of each row; of memory only."""

    def told(self) -> str:
        share = 100 * np.abs(np.exp(-self.logs) - 1)
        middle = float(np.median(self.logs))
        spread = 148 * float(np.median(np.abs(self.logs - middle)))
        return (
            f"{self.metric:9}  {self.device:12}  {self.basis:13}  {self.phase:5}  "
            f"{len(self.logs):4}  {share.mean():6.1f}  {100 * (np.exp(middle) - 1):+6.1f}  "
            f"{spread:6.1f}"
        )


HEADING = (
    "metric     card          basis          phase  rows  mean %  common  of one\n"
    "                                                             factor  model"
)


def h100_labels() -> list[Measurement]:
    """Our own of one GPU day."""
    sheet = next(sheet for sheet in SHEETS if sheet.measured)
    labels = [label for of_file in sheet.labels(Path()).values() for label in of_file]
    return [label for label in labels if label.outcome is Outcome.OK]


def h100_steps(traces: Path) -> Steps:
    rows = [
        (label, workload)
        for label in h100_labels()
        if label.step_time_ms is not None and (workload := traced(label, traces)) is not None
    ]
    labels = [label for label, _ in rows]
    return Steps(
        Evidence(
            "h100",
            "trappm",
            spec_of("h100"),
            [workload for _, workload in rows],
            np.log([label.step_time_ms or np.nan for label in labels]),
        ),
        np.array([label.configuration.architecture for label in labels]),
        np.array([label.configuration.phase is Phase.TRAIN for label in labels]),
    )


def inference_steps(key: str, data: Path, traces: Path) -> Steps:
    """timm's, in autocast."""
    source = step_time.SOURCES[key]
    labels = step_time.load(source, data, traces, most=INFER_STEPS)
    evidence = Evidence(
        device_of(source.device),
        f"timm {source.device}",
        spec_of(source.device),
        labels.workloads,
        np.log(labels.step_time_ms),
    )
    trains = np.zeros(len(labels.workloads), dtype=np.bool_)
    return Steps(evidence, labels.current_names, trains)


def evidence_of_all(data: Path, traces: Path) -> tuple[list[Steps], list[Evidence]]:
    """Steps and kernels of all known cards."""
    nodes = data / "nodes"
    known = [
        *published_steps(nodes, traces),
        *(timm_steps(data, traces, key) for key in ("train", "train-nhwc")),
        *nvidia_steps(nodes, traces),
        *(inference_steps(key, data, traces) for key in ("infer-3090", "infer-4090")),
        h100_steps(traces),
    ]
    kernels = [
        *(published_kernels(nodes, card, SHARE_OF_OTHERS) for card in KERNEL_CARDS),
        *(published_kernels(nodes, card, 1.0) for card in OTHER_KERNEL_CARDS),
    ]
    return known, kernels


def step_time_errors(
    known: Sequence[Steps], kernels: Sequence[Evidence], cards: Collection[str] = ()
) -> Iterator[Errors]:
    """Of each card, by what its constants rest on; of some cards only, if any are named."""
    for device in sorted({steps.evidence.device for steps in known}):
        if cards and device not in cards:
            continue
        fit = learned_from(
            [s.evidence for s in known if s.evidence.device != device]
            + [e for e in kernels if e.device != device]
        )
        common, own = fit.of_another_device(), [e for e in kernels if e.device == device]
        logs: dict[tuple[Basis, Phase], list[Array]] = defaultdict(list)
        for steps in (s for s in known if s.evidence.device == device):
            spec = steps.evidence.spec
            priors = {Basis.SPECIFICATION: StepTimePrior.like_others(spec, common)}
            if own:
                priors[Basis.KERNELS] = StepTimePrior.like_others(spec, common, own)
            for basis, prior in priors.items():
                for phase, off in steps.off(prior).items():
                    logs[basis, phase].append(off)
        for (basis, phase), parts in logs.items():
            yield Errors(STEP_MS, device, basis, phase, np.concatenate(parts))


def new_architecture_errors(
    known: Sequence[Steps], kernels: Sequence[Evidence]
) -> Iterator[Errors]:
    """Of each card with steps of other architectures, on a host of which nothing is known."""
    names = np.unique(np.concatenate([steps.architectures for steps in known]))
    folds = grouped_folds(names.tolist(), FOLDS, np.random.default_rng(0))
    logs: dict[tuple[str, Phase], list[Array]] = defaultdict(list)
    for fold in range(FOLDS):
        unseen = [np.isin(steps.architectures, names[folds == fold]) for steps in known]
        parts = zip(known, unseen, strict=True)
        fit = learned_from([*(s.evidence.at(~own) for s, own in parts), *kernels])
        for steps in (s.at(own) for s, own in zip(known, unseen, strict=True)):
            device, spec = steps.evidence.device, steps.evidence.spec
            for phase, off in steps.off(StepTimePrior(spec, fit.constants(device))).items():
                logs[device, phase].append(off)
    for (device, phase), of_card in sorted(logs.items()):
        yield Errors(STEP_MS, device, Basis.STEPS, phase, np.concatenate(of_card))


def memory_errors(data: Path) -> Iterator[Errors]:
    """Yield the errors of simulated steps alone, which no label of the card has adjusted.

    Two things belong to the software that ran and not to the card, so they are given for the A100,
    whose sheet is of 2023: what its process took beside the allocator (`PROCESS_MIB`), and the
    training loop. The H100 ran today's software, which users have.
    """
    a100 = read_labels(data / "a100_40gb_train_memory.csv")
    usable = read_usable(data / "a100_40gb_train_memory_quality.csv")
    judged: list[tuple[str, list[Measurement], Usable, MemoryPrior]] = [
        ("a100", a100, usable, MemoryPrior(loop=Loop.TUNED)),
        ("h100", h100_labels(), None, MemoryPrior.on(spec_of("h100"))),
    ]
    for device, labels, rows, prior in judged:
        with opened_workbench(
            "memory_mib", processes=os.cpu_count() or 1, usable=rows, watch=_show
        ) as bench:
            samples = bench.prepared(labels).samples
        groups = samples.groups
        logs = np.log(samples.values) - prior.log_values(samples.workloads)
        phases = np.array([workload.phase for workload in samples.workloads])
        for phase in Phase:
            chosen = samples.judged & (phases == phase)
            if chosen.any():
                names = [groups[i] for i in np.flatnonzero(chosen)]
                yield Errors(MEMORY, device, Basis.SPECIFICATION, phase, logs[chosen], names)


def _show(done: int, total: int, what: str) -> None:
    sys.stderr.write(f"{done}/{total} {what}\n")


def memory_quantiles(errors: Sequence[Errors]) -> Calibration:
    """Return those of training; of inference only the card is known that the process was measured
    on."""
    rows = [e for e in errors if (e.metric, e.phase) == (MEMORY, Phase.TRAIN)]
    logs = np.concatenate([e.logs for e in rows])
    names = [name for e in rows for name in e.architectures]
    return pooled_errors(logs, [e.device for e in rows for _ in e.logs], names)


def quantiles(errors: Sequence[Errors], basis: Basis, phase: Phase) -> Calibration:
    """Return those of step times of the cards with this basis; the data sheet replaces a missing
    one."""
    parts = [e for e in errors if (e.metric, e.phase) == (STEP_MS, phase)]
    has = {e.device for e in parts if e.basis is basis}
    parts = [e for e in parts if e.basis is (basis if e.device in has else Basis.SPECIFICATION)]
    logs = np.concatenate([e.logs for e in parts])
    return errors_of_devices(logs, [e.device for e in parts for _ in e.logs])


def coverage(errors: Sequence[Errors]) -> str:
    """Describe how many rows of each card lie in intervals made of the other cards' errors."""
    shares: dict[tuple[Basis, Phase], list[float]] = defaultdict(list)
    lines = []
    for row in errors:
        others = [e for e in errors if e.device != row.device]
        if row.metric == STEP_MS:
            inside = _share_within(row, quantiles(others, row.basis, row.phase))
            shares[row.basis, row.phase].append(inside)
        else:
            inside = _share_within(row, memory_quantiles(others))
            lines.append(
                f"memory of {row.device}, {row.phase}, in the 90 % interval of the other card: "
                f"{100 * inside:.1f} %"
            )
    memory = [e for e in errors if e.metric == MEMORY]
    low, high = np.exp(memory_quantiles(memory).interval())
    lines.append(f"90 % interval of memory from both cards: {low:.3f} to {high:.3f}")
    lines += [
        f"in the 90 % interval of other cards, mean of {len(s)} cards, {basis}, {phase}: "
        f"{100 * np.mean(s):.0f} % (least {100 * min(s):.0f})"
        for (basis, phase), s in shares.items()
    ]
    return "\n".join(lines)


def _share_within(row: Errors, calibration: Calibration) -> float:
    low, high = calibration.interval()
    return float(np.mean((low <= row.logs) & (row.logs <= high)))


def shipped(
    known: Sequence[Steps], kernels: Sequence[Evidence], errors: Sequence[Errors]
) -> OtherDevices:
    """What all labels say of other cards, and how far that was off."""
    fit = learned_from([*(s.evidence for s in known), *kernels])
    common = fit.of_another_device()
    of_cards = {
        (Basis.KERNELS, card): StepTimePrior.like_others(
            spec_of(card), common, [e for e in kernels if e.device == card]
        ).constants
        for card in sorted({e.device for e in kernels})
    }
    steps = {s.evidence.device for s in known}
    of_cards |= {(Basis.STEPS, card): fit.constants(card) for card in sorted(steps)}
    return OtherDevices(
        common.centre,
        of_cards,
        {(b, p): quantiles(errors, b, p) for b in Basis for p in Phase},
        memory_quantiles(errors),
    )


def source_of(evidence: Evidence) -> dict[str, object]:
    """Its entry in a manifest."""
    name = evidence.host.split()[0]
    file, licence = FILES[name]
    if callable(file):
        file = file(evidence)
    return {
        "device": evidence.device,
        "metric": "step_time_ms",
        "for": OTHERS,
        "file": file,
        "source": evidence.host.strip(),
        **({"licence": licence} if licence else {}),
        "labels": len(evidence.workloads),
    }


def _timm_file(evidence: Evidence) -> str:
    first = evidence.workloads[0]
    layout = "nhwc" if first.memory_format is MemoryFormat.CHANNELS_LAST else "nchw"
    return f"{evidence.device.replace('-', '')}_{first.phase}_step_amp_{layout}.csv"


def _neusight_file(evidence: Evidence) -> str:
    part = "v100_a100" if evidence.device in {"v100", "a100"} else "other_gpus"
    return f"nodes/neusight_kernels_fp32_{part}.csv.gz"


FILES: dict[str, tuple[str | Callable[[Evidence], str], str]] = {
    "pycls": ("nodes/pycls_v100_step_fp32.csv", "MIT"),
    "pytorch-gpu-benchmark": ("nodes/pgb_torchvision_step.csv", "MIT"),
    "timm": (_timm_file, "Apache-2.0"),
    NVIDIA: ("nodes/dle_{train_throughput,infer_latency}.csv", "BSD-3-Clause"),
    "neusight": (_neusight_file, "MIT"),
    "trappm": ("h100/sweeps", ""),
}
"""File and licence of each source."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with the published labels")
    parser.add_argument("--traces", type=Path, help="where kernels are kept; memory needs none")
    parser.add_argument("--only", choices=["memory"], help="leave step times as they are")
    parser.add_argument("--write", action="store_true", help="what is known, into the package")
    parser.add_argument(
        "--v100", type=int, nargs="+", help="with these seeds, as step_time_nodes.py judges it"
    )
    options = parser.parse_args()
    if options.only == "memory":
        errors = _printed(memory_errors(options.data))
        if options.write:
            known, sources = known_of_others()
            write(replace(known, memory=memory_quantiles(errors)), sources)
            sys.stdout.write(f"{FILE}\n")
        return
    if options.traces is None:
        parser.error("step times need --traces; or give --only memory")
    known_steps, kernels = evidence_of_all(options.data, options.traces)
    if options.v100 is not None:
        of_v100 = next(part for part in kernels if part.device == "v100")
        others = [part for part in kernels if part.device != "v100"]
        judged = judge_v100(known_steps, others, of_v100, options.v100)
        sys.stdout.write(f"{medians(judged)}\n")
        return
    errors = _printed(
        chain(
            memory_errors(options.data),
            step_time_errors(known_steps, kernels),
            new_architecture_errors(known_steps, kernels),
        )
    )
    if options.write:
        evidence = [*(steps.evidence for steps in known_steps), *kernels]
        write(shipped(known_steps, kernels, errors), [source_of(part) for part in evidence])
        sys.stdout.write(f"{FILE}\n")


def _printed(errors: Iterable[Errors]) -> list[Errors]:
    """Print the errors as they come, and then what intervals of them hold."""
    sys.stdout.write(f"{HEADING}\n")
    rows = []
    for row in errors:
        rows.append(row)
        sys.stdout.write(f"{row.told()}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{coverage(rows)}\n")
    return rows


if __name__ == "__main__":
    main()
