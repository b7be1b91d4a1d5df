"""How far off answers are for a card that nobody has labelled, and what the snapshot ships of it.

    PYTHONPATH=. python benchmarks/learner/other_devices.py ../shared/data --traces FOLDER [--write]

Each card with labels is held out as a whole: its step times are predicted from its data sheet and
the other cards' labels, and once more with kernels of its own, where somebody timed some; then, by
architectures held out, from its own steps and all others'. Memory is predicted for an A100
(GPUMemNet, software of 2023) and an H100 (our own labels) from simulated steps alone. With --write
all cards' labels go into `learner/physics/devices/`, with the quantiles of these errors.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.learner import step_time
from benchmarks.learner.step_time_nodes import (
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
from trappm.experiments.label_files import read_labels
from trappm.experiments.shipped_sheets import SHEETS
from trappm.learner.heads.other_devices import (
    FILE,
    OTHERS,
    Basis,
    OtherDevices,
    errors_of_devices,
    write,
)
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.devices.joint_fit import Evidence
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.stats.calibration import Calibration
from trappm.learner.stats.folds import grouped_folds
from trappm.learner.workload import Workload
from trappm.profiler.errors import TrappmError
from trappm.profiler.records import Measurement, MemoryFormat, Outcome, Phase
from trappm.profiler.static_profile import static_profile

Array = npt.NDArray[np.float64]

INFER_STEPS = 120
OTHER_KERNEL_CARDS = ("v100-pcie-32gb", "t4", "h100-sxm-80gb")
A100_ARCHITECTURES = 60
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
    """Of simulated steps alone."""
    a100 = read_labels(data / "a100_40gb_train_memory.csv")
    a100 = [label for label in a100 if label.outcome is Outcome.OK]
    names = sorted({label.configuration.architecture for label in a100})
    chosen = set(np.random.default_rng(0).permutation(names)[:A100_ARCHITECTURES].tolist())
    sheets = {
        "a100": [label for label in a100 if label.configuration.architecture in chosen],
        "h100": h100_labels(),
    }
    for device, labels in sheets.items():
        prior = MemoryPrior.on(spec_of(device))
        logs: dict[Phase, list[float]] = defaultdict(list)
        for label, workload in _simulated(labels):
            if label.memory_mib is not None:
                predicted = float(prior.log_values([workload])[0])
                logs[workload.phase].append(float(np.log(label.memory_mib)) - predicted)
        for phase, values in logs.items():
            yield Errors(MEMORY, device, Basis.SPECIFICATION, phase, np.array(values))


def _simulated(labels: Sequence[Measurement]) -> Iterator[tuple[Measurement, Workload]]:
    """Those in fp32 and contiguous, which static profiles are of."""
    profiles = {}
    for label in labels:
        what = label.configuration
        if (what.precision, what.memory_format) != ("fp32", "contiguous"):
            continue
        key = what.architecture, what.input_size
        if key not in profiles:
            try:
                profiles[key] = static_profile(*key)
            except TrappmError as error:
                sys.stderr.write(f"left out: {error}\n")
                profiles[key] = None
        profile = profiles[key]
        if profile is not None and profile.step is not None:
            yield (
                label,
                Workload(
                    graph=profile.graph.at(what.batch_size),
                    precision=what.precision,
                    memory_format=what.memory_format,
                    optimizer=what.optimizer,
                    phase=what.phase,
                    step=profile.step,
                ),
            )


def quantiles(errors: Sequence[Errors], metric: str, basis: Basis, phase: Phase) -> Calibration:
    """Of the cards with this basis; for those that have none of it, their data sheet stands in."""
    parts = [e for e in errors if (e.metric, e.phase) == (metric, phase)]
    has = {e.device for e in parts if e.basis is basis}
    parts = [e for e in parts if e.basis is (basis if e.device in has else Basis.SPECIFICATION)]
    logs = np.concatenate([e.logs for e in parts])
    return errors_of_devices(logs, [e.device for e in parts for _ in e.logs])


def coverage(errors: Sequence[Errors]) -> str:
    """Of the intervals, each card's from the other cards' errors."""
    shares: dict[tuple[Basis, Phase], list[float]] = defaultdict(list)
    for row in (e for e in errors if e.metric == STEP_MS):
        others = [e for e in errors if e.device != row.device]
        low, high = quantiles(others, STEP_MS, row.basis, row.phase).interval()
        shares[row.basis, row.phase].append(float(np.mean((low <= row.logs) & (row.logs <= high))))
    return "\n".join(
        f"in the 90 % interval of other cards, mean of {len(s)} cards, {basis}, {phase}: "
        f"{100 * np.mean(s):.0f} % (least {100 * min(s):.0f})"
        for (basis, phase), s in shares.items()
    )


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
        {(b, p): quantiles(errors, STEP_MS, b, p) for b in Basis for p in Phase},
        # Of inference one card is known, whose process the prior was measured on.
        quantiles(errors, MEMORY, Basis.SPECIFICATION, Phase.TRAIN),
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
    parser.add_argument("--traces", type=Path, required=True, help="where kernels are kept")
    parser.add_argument("--write", action="store_true", help="what is known, into the package")
    parser.add_argument(
        "--v100", type=int, nargs="+", help="with these seeds, as step_time_nodes.py judges it"
    )
    options = parser.parse_args()
    known, kernels = evidence_of_all(options.data, options.traces)
    if options.v100 is not None:
        of_v100 = next(part for part in kernels if part.device == "v100")
        others = [part for part in kernels if part.device != "v100"]
        sys.stdout.write(f"{medians(judge_v100(known, others, of_v100, options.v100))}\n")
        return
    sys.stdout.write(f"{HEADING}\n")
    errors = []
    for row in chain(
        memory_errors(options.data),
        step_time_errors(known, kernels),
        new_architecture_errors(known, kernels),
    ):
        errors.append(row)
        sys.stdout.write(f"{row.told()}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{coverage(errors)}\n")
    if options.write:
        evidence = [*(steps.evidence for steps in known), *kernels]
        write(shipped(known, kernels, errors), [source_of(part) for part in evidence])
        sys.stdout.write(f"{FILE}\n")


if __name__ == "__main__":
    main()
