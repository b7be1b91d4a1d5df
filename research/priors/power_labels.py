"""Labels of power: Zeus's training on a V100 and a P100 under limits, and our own of an H100.

Zeus's ResNet-50 is timm's; `zeus_networks` has the structures of ShuffleNet V2 at 32 px and BERT.
Its times are means of an epoch, so the loader is inside.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from research.priors import step_time_nodes
from research.priors.power_fit import Labels
from research.priors.zeus_networks import Bert, shufflenet
from research.snapshot.shipped_sheets import H100_FILES, our_labels
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.power.known_power import MEASURED
from trappm.learner.physics.power.loads import loads_of
from trappm.learner.physics.power.operating_point import Sheet
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.learner.workload import Workload
from trappm.prediction.snapshot_choice import SHIPPED
from trappm.profiler.devices.catalogue import Card, card_of
from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import Graph, Measurement, Optimizer, Phase
from trappm.profiler.simulation.kernel_profile import KernelProfile
from trappm.profiler.static_profile import kernel_profile
from trappm.store.files import read_file

NETWORKS = {
    ("resnet50", "imagenet"): 1_281_167,
    ("shufflenetv2", "cifar100"): 50_000,
    ("bert_base_uncased", "squad"): 88_524,
}
"""Samples of an epoch; SQuAD's are sequences of 384 tokens (its usual number of features)."""
CARDS = ("v100", "p100")


@dataclass(frozen=True, eq=False)
class Rows:
    """Labels of a card, and what they are of (n)."""

    labels: Labels
    prior: StepTimePrior
    workloads: Sequence[Workload]
    networks: npt.NDArray[np.str_]
    settings: npt.NDArray[np.str_]
    """Batch size and all else but the limit."""

    @property
    def card(self) -> str:
        return self.labels.card


def traced(folder: Path, name: str, make: Callable[[], KernelProfile]) -> KernelProfile:
    path = folder / name
    if not path.exists():
        path.write_bytes(make().to_bytes())
    return KernelProfile.from_bytes(path.read_bytes())


def prior_of(card: str) -> StepTimePrior:
    """Of step times: the shipped V100's, which has not seen Zeus's, and what all cards share."""
    name = MEASURED[card][0]
    if card == "v100":
        heads = load_snapshot(SHIPPED).heads["v100-16gb"][Phase.TRAIN].heads
        shipped: StepTimePrior = heads.heads["step_time_ms"].prior  # type: ignore[attr-defined]
        return StepTimePrior(spec_of(name), shipped.constants)
    return StepTimePrior.like_others(spec_of(name), known_devices())


def zeus(path: Path, traces: Path) -> list[Rows]:
    """Labels of Zeus's networks by card; the time under the highest limit is the usual one."""
    profiles = {
        "resnet50": traced(traces, "resnet50@224", lambda: kernel_profile("resnet50", 224)),
        "shufflenetv2": traced(
            traces,
            "shufflenetv2@32",
            lambda: kernel_profile(shufflenet(), 32, fused_attention=False),
        ),
        "bert_base_uncased": traced(
            traces,
            "bert@384",
            lambda: kernel_profile(
                Bert(), Sample((384, 768), torch.float32), fused_attention=False
            ),
        ),
    }
    groups: dict[str, dict[tuple[str, int, str], list[tuple[float, float, float]]]]
    groups = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            network, card = row["network"], row["device"].lower()
            samples = NETWORKS.get((network, row["dataset"]))
            if samples is None or card not in CARDS:
                continue
            batch, epoch_s, power_w = (
                float(row[n]) for n in ("batch_size", "epoch_s", "avg_power_w")
            )
            steps = np.ceil(samples / batch)
            groups[card][network, int(batch), row["optimizer"]].append(
                (float(row["power_limit_w"]), power_w, 1e3 * epoch_s / steps)
            )
    result = []
    for card, of_card in groups.items():
        prior, numbers, about, workloads = prior_of(card), [], [], []
        for (network, batch, optimizer), measured in sorted(of_card.items()):
            usual_w, _, usual_ms = max(measured)
            workload = Workload(
                graph=Graph.empty(batch), optimizer=Optimizer.ADAM, kernels=profiles[network]
            )
            for limit_w, power_w, time_ms in sorted(measured):
                known_ms = np.nan if limit_w == usual_w else time_ms
                share = 2 / len(measured)
                numbers.append((usual_ms, usual_w, limit_w, power_w, known_ms, share))
                about.append((network, f"{batch} {optimizer}"))
                workloads.append(workload)
        sheet = Sheet.of(_card(card))
        columns = np.array(numbers).T
        labels = Labels(card, sheet, loads_of(workloads, prior), *columns)
        networks, settings = np.array(about).T
        result.append(Rows(labels, prior, workloads, networks, settings))
    return result


def h100(traces: Path) -> Rows:
    """Our own labels, each at the card's own limit."""
    prior, workloads, numbers, about = prior_of("h100"), [], [], []
    for label in _h100_labels():
        what = label.configuration
        if label.power_w is None or label.step is None:
            continue
        workload = step_time_nodes.traced(label, traces)
        if workload is None:
            continue
        workloads.append(workload)
        numbers.append((label.step.mean_ms, 700.0, 700.0, label.power_w, np.nan))
        # Those that differ by their optimizer alone are near-copies of each other.
        parts = what.batch_size, what.input_size, what.precision, what.memory_format, what.phase
        about.append((what.architecture, " ".join(map(str, parts))))
    count = Counter(about)
    weights = np.array([1 / count[key] for key in about])
    labels = Labels(
        "h100", Sheet.of(_card("h100")), loads_of(workloads, prior), *np.array(numbers).T, weights
    )
    networks, settings = np.array(about).T
    return Rows(labels, prior, workloads, networks, settings)


def _h100_labels() -> list[Measurement]:
    """Unstable ones as well: their mean power is of all of their steps."""

    def read(path: Path) -> list[Measurement]:
        return [v.measurement for v in read_file(path) if v.measurement is not None]

    return [label for file in H100_FILES for label in our_labels(file, read)]


def _card(model: str) -> Card:
    card = card_of(MEASURED[model][0])
    assert card is not None
    return card
