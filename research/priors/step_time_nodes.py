"""Step times of a V100 from few kernels and few steps, with labels that others published.

    PYTHONPATH=. python research/priors/step_time_nodes.py ../shared/data --traces FOLDER
        [--devices [DEVICE ...] | --write]

The first judges pycls' steps on V100s in fp32 after 0 to 100 V100 labels, with and without V100
kernels, from what other devices have in common, from an A100's constants, and from the
specification alone. Architectures that are judged are held out of all devices' steps. `--devices`
holds whole devices out. `--write` writes what is known of devices into the package.
Evidence: timm's training steps on an RTX 3090, pytorch-gpu-benchmark's steps of seven cards,
NeuSight's kernels of three; docs/studies/step_time_constants.md has the tables. Kernels are traced
once and kept in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from research.importers import node_steps
from research.priors import step_time
from research.snapshot.shipped_sheets import neusight_kernels
from trappm.learner.physics.device_specs import known_spec, spec_of
from trappm.learner.physics.devices.joint_fit import Distribution, Evidence, JointFit
from trappm.learner.physics.devices.known_devices import write
from trappm.learner.physics.kernel_times import spreads, starting_constants
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import TrappmError
from trappm.profiler.records import (
    Configuration,
    Graph,
    Measurement,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
)
from trappm.profiler.records.step_scope import WHOLE_STEP, StepScope
from trappm.profiler.simulation.kernel_profile import KernelProfile
from trappm.profiler.static_profile import kernel_profile

Array = npt.NDArray[np.float64]
Chosen = npt.NDArray[np.bool_]

SEEDS = tuple(range(5))
LABELS = (0, 5, 10, 30, 100)
OF_DEVICES = 0.35
"""Of the spreads of constants: how far devices are apart at first; labels move it."""
TIMM_STEPS = 250
SHARE_OF_OTHERS = 0.5
"""Of the kernels of each known device; the labels of all are fitted together."""
KERNEL_CARDS = ("a100-pcie-40gb", "a100-pcie-80gb", "p100-pcie-16gb")
SOURCE = "pycls"
NVIDIA = "deep-learning-examples"
TWINS = {
    "efficientnet-widese-b0": ("efficientnet_b0", 224),
    "efficientnet-widese-b4": ("efficientnet_b4", 380),
}
"""The model of timm that stands for NVIDIA's of wide squeeze-excitation, which timm has not, and
its input size: the kernels are the same but for two products of one pixel a block."""
LEAST_BATCH = 32
"""Of NVIDIA's steps that are learned from: smaller ones wait for their host."""
TRAINING = {"per_gpu_micro_batch": "batch", "micro_step_ms_derived": "step_ms"}
INFERENCE = {"per_gpu_batch": "batch", "latency_from_throughput_ms": "step_ms"}
"""Columns of the two sheets. Latencies have outliers in their means, throughputs have not."""


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of one source on one device, beside what each is of."""

    evidence: Evidence
    architectures: npt.NDArray[np.str_]
    trains: Chosen

    def at(self, chosen: Chosen) -> Steps:
        return Steps(self.evidence.at(chosen), self.architectures[chosen], self.trains[chosen])

    def off(self, prior: StepTimePrior) -> dict[Phase, Array]:
        """log(measured / predicted) of the phases that it has."""
        logs = self.evidence.log_values - prior.log_values(self.evidence.workloads)
        phases = {Phase.TRAIN: self.trains, Phase.INFER: ~self.trains}
        return {phase: logs[rows] for phase, rows in phases.items() if rows.any()}


def device_of(key: str) -> str:
    """The card whose constants a key's labels are evidence for, whatever its form and memory."""
    return read_name(key).model


def published_steps(data: Path, traces: Path) -> list[Steps]:
    """The steps of one GPU in `data` by source, run and device; of cards that are listed."""
    rows: dict[tuple[str, str, str], list[tuple[Measurement, Workload]]] = defaultdict(list)
    for file in ("pycls_v100_step_fp32.csv", "pgb_torchvision_step.csv"):
        for verdict in node_steps.verdicts(data / file):
            label = verdict.measurement
            if label is None or known_spec(label.device) is None:
                continue
            workload = traced(label, traces)
            if workload is not None:
                key = label.device, label.protocol.name, str(label.environment["run"])
                rows[key].append((label, workload))
    result = []
    for (device, source, run), labelled in rows.items():
        labels = [label for label, _ in labelled]
        result.append(
            Steps(
                Evidence(
                    device_of(device),
                    f"{source} {device} {run}",
                    spec_of(device),
                    [workload for _, workload in labelled],
                    np.log([label.step_time_ms or np.nan for label in labels]),
                ),
                np.array([label.configuration.architecture for label in labels]),
                np.array([label.configuration.phase is Phase.TRAIN for label in labels]),
            )
        )
    return result


def nvidia_steps(nodes: Path, traces: Path, least_batch: int = LEAST_BATCH) -> list[Steps]:
    """NVIDIA's by card; without rows that the sheet calls suspect, or that several GPUs share."""
    training = pd.read_csv(nodes / "dle_train_throughput.csv").rename(columns=TRAINING)
    training = training[(training.n_gpus == 1) & training.suspect.isna()]
    inference = pd.read_csv(nodes / "dle_infer_latency.csv").rename(columns=INFERENCE)
    sheet = pd.concat([training.assign(phase=Phase.TRAIN), inference.assign(phase=Phase.INFER)])
    rows: dict[str, list[tuple[Workload, str, float]]] = defaultdict(list)
    sheet = sheet[sheet.model.isin(TWINS) & sheet.step_ms.notna() & (sheet.batch >= least_batch)]
    for row in sheet.to_dict("records"):
        name, size = TWINS[str(row["model"])]
        half = row["precision"] == "amp"
        workload = traced_step(
            Configuration(
                architecture=name,
                batch_size=int(row["batch"]),
                input_size=size,
                phase=row["phase"],
                precision=Precision.AMP_FP16 if half else Precision.FP32,
                # NVIDIA's scripts take channels-last in autocast, and in nothing else.
                memory_format=MemoryFormat.CHANNELS_LAST if half else MemoryFormat.CONTIGUOUS,
                optimizer=Optimizer.MOMENTUM,
            ),
            WHOLE_STEP,
            traces,
        )
        if workload is not None:
            rows[str(row["device"]).lower()].append((workload, name, float(row["step_ms"])))
    return [
        Steps(
            Evidence(
                device_of(device),
                f"{NVIDIA} {device}",
                spec_of(device),
                [workload for workload, _, _ in labelled],
                np.log([step_ms for _, _, step_ms in labelled]),
            ),
            np.array([name for _, name, _ in labelled]),
            np.array([workload.phase is Phase.TRAIN for workload, _, _ in labelled]),
        )
        for device, labelled in rows.items()
    ]


def traced(label: Measurement, traces: Path) -> Workload | None:
    """The kernels of what was measured; None where they cannot be traced."""
    return traced_step(label.configuration, StepScope.of(label.environment), traces)


def traced_step(what: Configuration, scope: StepScope, traces: Path) -> Workload | None:
    """The kernels of a step; None where they cannot be traced."""
    path = traces / f"{what.architecture}@{what.input_size}-{what.precision}-{what.memory_format}"
    if not path.exists():
        try:
            profile = kernel_profile(
                what.architecture,
                what.input_size,
                precision=what.precision,
                memory_format=what.memory_format,
            )
        except TrappmError as error:
            sys.stderr.write(f"left out: {error}\n")
            return None
        path.write_bytes(profile.to_bytes())
    return Workload(
        graph=Graph.empty(what.batch_size),
        precision=what.precision,
        memory_format=what.memory_format,
        optimizer=what.optimizer,
        phase=what.phase,
        scope=scope,
        kernels=KernelProfile.from_bytes(path.read_bytes()),
    )


def timm_steps(data: Path, traces: Path, key: str = "train") -> Steps:
    """timm's training steps on an RTX 3090, in autocast; of one of `step_time.SOURCES`."""
    source = step_time.SOURCES[key]
    labels = step_time.load(source, data, traces, most=TIMM_STEPS)
    evidence = Evidence(
        device_of(source.device),
        "timm",
        spec_of(source.device),
        labels.workloads,
        np.log(labels.step_time_ms),
    )
    trains = np.ones(len(labels.workloads), dtype=np.bool_)
    return Steps(evidence, labels.current_names, trains)


def published_kernels(data: Path, card: str, share: float) -> Evidence:
    """Kernels of one card alone, a share of those that the shipped snapshot learns from."""
    file = "v100_a100" if card[:4] in {"v100", "a100"} else "other_gpus"
    whole = neusight_kernels(data / f"neusight_kernels_fp32_{file}.csv.gz", card)
    chosen = np.arange(len(whole.workloads)) % round(1 / share) == 0
    return replace(whole.at(chosen), device=device_of(card), host=f"neusight {card}")


def learned_from(evidence: Iterable[Evidence]) -> JointFit:
    first = Distribution.first(starting_constants(), spreads(1.0), of_devices=OF_DEVICES)
    return JointFit(list(evidence), first, learns=True)


def errors(prior: StepTimePrior, steps: Steps) -> dict[str, float]:
    """Mean absolute percentage error by phase."""
    names = {Phase.TRAIN: "training", Phase.INFER: "inference"}
    return {
        names[phase]: 100 * float(np.abs(np.exp(-off) - 1).mean())
        for phase, off in steps.off(prior).items()
    }


def judge_v100(
    known: Sequence[Steps], kernels: Sequence[Evidence], of_v100: Evidence, seeds: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """Errors on pycls' V100 steps of architectures held out, by start, kernels and labels."""
    target = next(s for s in known if s.evidence.host.startswith(SOURCE))
    others = [s for s in known if s.evidence.device != target.evidence.device]
    spec = target.evidence.spec
    judged: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in seeds:
        test = step_time.held_out(target.architectures, seed)
        unseen = target.architectures[test]
        fit = learned_from(
            [*(s.evidence.at(~np.isin(s.architectures, unseen)) for s in others), *kernels]
        )
        common = fit.of_another_device()
        a100 = replace(common, centre=fit.constants("a100"))
        order = np.random.default_rng(seed).permutation(np.flatnonzero(~test))
        for count in LABELS:
            drawn = np.zeros(len(test), dtype=np.bool_)
            drawn[order[:count]] = True
            labels = target.evidence.at(drawn)
            used = f"{min(count, len(order))} labels"
            for start, known_constants in (("all devices", common), ("A100", a100)):
                for beside, own in (("", ()), (" and kernels", (of_v100,))):
                    prior = StepTimePrior.like_others(spec, known_constants, own)
                    prior = prior.refit(labels.workloads, labels.log_values)
                    _add(
                        judged[f"{used}{beside}, from {start}"],
                        errors(prior, target.at(test)),
                    )
            scratch = StepTimePrior(spec).refit(labels.workloads, labels.log_values)
            _add(judged[f"{used}, from the specification"], errors(scratch, target.at(test)))
        _tell(f"seed {seed}", judged)
    return judged


def judge_devices(
    known: Sequence[Steps], kernels: Sequence[Evidence], devices: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Errors on all steps of a device of which nothing but the specification, or kernels, are
    known; other devices' steps of the same architectures are."""
    judged: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for device in devices:
        fit = learned_from(
            [s.evidence for s in known if s.evidence.device != device]
            + [e for e in kernels if e.device != device]
        )
        common, own = fit.of_another_device(), [e for e in kernels if e.device == device]
        for steps in (s for s in known if s.evidence.device == device):
            spec, host = steps.evidence.spec, steps.evidence.host
            starts = {"the specification": StepTimePrior(spec)}
            starts["other devices"] = StepTimePrior.like_others(spec, common)
            if own:
                starts["other devices and kernels"] = StepTimePrior.like_others(spec, common, own)
            for start, prior in starts.items():
                _add(judged[f"{host}, from {start}"], errors(prior, steps))
        _tell(device, judged)
    return judged


def _add(judged: dict[str, list[float]], new: Mapping[str, float]) -> None:
    for phase, error in new.items():
        judged[phase].append(error)


def _tell(what: str, judged: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    last = {key: {p: round(v[-1], 1) for p, v in row.items()} for key, row in judged.items()}
    sys.stderr.write(f"{what}: {json.dumps(last)}\n")


def medians(judged: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Over seeds, as JSON."""
    rows = {
        key: {phase: round(float(np.median(values)), 1) for phase, values in row.items()}
        for key, row in judged.items()
    }
    return json.dumps(rows, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with the published labels")
    parser.add_argument("--traces", type=Path, required=True, help="where kernels are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--devices", nargs="*", help="judge these as a whole, by default three")
    parser.add_argument("--write", action="store_true", help="what is known, into the package")
    options = parser.parse_args()
    nodes = options.data / "nodes"
    known = [*published_steps(nodes, options.traces), timm_steps(options.data, options.traces)]
    kernels = [published_kernels(nodes, card, SHARE_OF_OTHERS) for card in KERNEL_CARDS]
    of_v100 = published_kernels(nodes, "v100-pcie-32gb", 1.0)
    if options.write:
        evidence = [*(steps.evidence for steps in known), *kernels]
        # The shipped snapshot has heads of these two, which are judged on the same labels.
        fit = learned_from(part for part in evidence if part.device not in {"a100", "v100"})
        write(fit.of_another_device())
        return
    if options.devices is not None:
        wanted = options.devices or ["a100", "titan-v", "rtx-2080-ti"]
        judged = judge_devices(known, [*kernels, of_v100], wanted)
    else:
        judged = judge_v100(known, kernels, of_v100, options.seeds)
    print(medians(judged))


if __name__ == "__main__":
    main()
