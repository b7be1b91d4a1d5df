"""Labels of power: Zeus's training on a V100 and a P100 under limits, and our own of an H100.

Zeus's ResNet-50 is timm's; `zeus_networks` has the structures of ShuffleNet V2 at 32 px and BERT.
Its times are means of an epoch, so they include the loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from research.priors.power_fit import Labels
from research.priors.steps import kernels, traced_label
from research.priors.zeus_networks import Bert, shufflenet
from research.snapshot.shipped_sheets import H100_FILES, our_attempts
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.power.known_power import MEASURED
from trappm.learner.physics.power.loads import loads_of
from trappm.learner.physics.power.operating_point import Sheet
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.learner.workload import Workload
from trappm.prediction.snapshot_choice import SHIPPED
from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import Graph, Optimizer, Phase
from trappm.profiler.static_profile import kernel_profile

EPOCHS = pd.DataFrame(
    [
        ("resnet50", "imagenet", 1_281_167),
        ("shufflenetv2", "cifar100", 50_000),
        ("bert_base_uncased", "squad", 88_524),
    ],
    columns=["network", "dataset", "samples"],
)
"""Samples per epoch; SQuAD's are sequences of 384 tokens (its usual number of features)."""
CARDS = ("v100", "p100")
H100_LIMIT_W = 700.0


@dataclass(frozen=True, eq=False)
class Rows:
    """Labels of a card with their workloads (n rows)."""

    labels: Labels
    prior: StepTimePrior
    workloads: Sequence[Workload]
    networks: npt.NDArray[np.str_]
    settings: npt.NDArray[np.str_]
    """Batch size and everything else except the limit."""

    @property
    def card(self) -> str:
        return self.labels.card

    @classmethod
    def of(
        cls, card: str, prior: StepTimePrior, workloads: Sequence[Workload], table: pd.DataFrame
    ) -> Rows:
        """Combine workloads with a table of their labels' columns, `network` and `setting`."""
        found = card_of(MEASURED[card][0])
        assert found is not None
        names = ("usual_ms", "usual_w", "limit_w", "power_w", "time_ms", "weight")
        columns = {name: table[name].to_numpy(dtype=np.float64) for name in names}
        labels = Labels(card, Sheet.of(found), loads_of(workloads, prior), **columns)
        networks, settings = (table[c].to_numpy(dtype=np.str_) for c in ("network", "setting"))
        return cls(labels, prior, workloads, networks, settings)


def prior_of(card: str) -> StepTimePrior:
    """Return a prior of step times that has not seen Zeus's: the shipped V100's, or all cards'."""
    name = MEASURED[card][0]
    if card == "v100":
        heads = load_snapshot(SHIPPED).heads["v100-16gb"][Phase.TRAIN].heads
        shipped: StepTimePrior = heads.heads["step_time_ms"].prior  # type: ignore[attr-defined]
        return StepTimePrior(spec_of(name), shipped.constants)
    return StepTimePrior.like_others(spec_of(name), known_devices())


def zeus(path: Path, traces: Path) -> list[Rows]:
    """Return the labels of Zeus's networks by card; the highest limit is the usual one."""
    profiles = {
        "resnet50": kernels(traces, "resnet50@224", lambda: kernel_profile("resnet50", 224)),
        "shufflenetv2": kernels(
            traces,
            "shufflenetv2@32",
            lambda: kernel_profile(shufflenet(), 32, fused_attention=False),
        ),
        "bert_base_uncased": kernels(
            traces,
            "bert@384",
            lambda: kernel_profile(
                Bert(), Sample((384, 768), torch.float32), fused_attention=False
            ),
        ),
    }
    sheet = pd.read_csv(path).merge(EPOCHS, on=["network", "dataset"])
    sheet["card"] = sheet.device.str.lower()
    sheet["limit_w"], sheet["power_w"] = sheet.power_limit_w, sheet.avg_power_w
    sheet["step_ms"] = 1e3 * sheet.epoch_s / np.ceil(sheet.samples / sheet.batch_size)
    keys = ["network", "batch_size", "optimizer"]
    result = []
    for card in dict.fromkeys(card for card in sheet.card if card in CARDS):
        own = sheet[sheet.card == card].sort_values([*keys, "limit_w", "power_w", "step_ms"])
        groups = own.groupby(keys)
        usual_w, usual_ms = groups.limit_w.transform("last"), groups.step_ms.transform("last")
        own = own.assign(
            usual_w=usual_w,
            usual_ms=usual_ms,
            time_ms=own.step_ms.where(own.limit_w != usual_w),
            weight=2 / groups.limit_w.transform("size"),
            setting=own.batch_size.astype(str) + " " + own.optimizer,
        )
        workloads = {
            key: Workload(
                graph=Graph.empty(int(key[1])), optimizer=Optimizer.ADAM, kernels=profiles[key[0]]
            )
            for key in groups.groups
        }
        of_rows = [workloads[key] for key in own[keys].itertuples(index=False, name=None)]
        result.append(Rows.of(card, prior_of(card), of_rows, own))
    return result


def h100(traces: Path) -> Rows:
    """Return our own labels, each at the card's own limit.

    Unstable ones are included: their mean power is that of all of their steps.
    """
    workloads, rows = [], []
    for label in (label for file in H100_FILES for label in our_attempts(file)):
        what = label.configuration
        if label.power_w is None or label.step is None:
            continue
        workload = traced_label(label, traces)
        if workload is None:
            continue
        workloads.append(workload)
        # Labels that differ by their optimizer alone are near-copies of each other.
        parts = what.batch_size, what.input_size, what.precision, what.memory_format, what.phase
        rows.append(
            {
                "usual_ms": label.step.mean_ms,
                "power_w": label.power_w,
                "network": what.architecture,
                "setting": " ".join(map(str, parts)),
            }
        )
    table = pd.DataFrame(rows).assign(usual_w=H100_LIMIT_W, limit_w=H100_LIMIT_W, time_ms=np.nan)
    table["weight"] = 1 / table.groupby(["network", "setting"]).power_w.transform("size")
    return Rows.of("h100", prior_of("h100"), workloads, table)
