"""Labels of power: Zeus's training on a V100 and a P100 under limits, and our own of an H100.

Zeus's ResNet-50 is timm's. Its other networks are here as structures: ShuffleNet V2 (Ma et al.
2018) as is common for CIFAR, with a 3x3 convolution of stride 1 at the start and no pooling before
the end, and BERT-base with sequences of 384 tokens, as is usual for SQuAD, without its embedding.
Times are means of an epoch, so they include the loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from research.priors.power_fit import PowerLabels
from research.priors.steps import traced_label
from research.snapshot.shipped_sheets import H100_FILES, our_attempts
from trappm.extensions.power_limits.step_power import Sheet
from trappm.learner.interface import Workload
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.power import MEASURED, loads_of
from trappm.learner.physics.step_time import StepTimePrior
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.prediction.selection import SHIPPED
from trappm.profiler.devices.catalogue import card_of, spec_of
from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import Graph, Optimizer, Phase
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import TraceSettings

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

    labels: PowerLabels
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
        labels = PowerLabels(card, Sheet.of(found), loads_of(workloads, prior), **columns)
        networks, settings = (table[c].to_numpy(dtype=np.str_) for c in ("network", "setting"))
        return cls(labels, prior, workloads, networks, settings)


def prior_of(card: str) -> StepTimePrior:
    """Return a prior of step times that has not seen Zeus's: the shipped V100's, or all cards'."""
    name = MEASURED[card][0]
    if card == "v100":
        heads = load_snapshot(SHIPPED).heads["v100-16gb"][Phase.TRAIN].heads
        shipped: StepTimePrior = heads.heads["step_time_ms"].prior  # type: ignore[attr-defined]
        return StepTimePrior(spec_of(name), shipped.constants)
    return StepTimePrior(spec_of(name), known_devices().centre)


def zeus(path: Path, traces: Path) -> list[Rows]:
    """Return the labels of Zeus's networks by card; the highest limit is the usual one."""
    unfused = TraceSettings(fused_attention=False)
    steps = {
        "resnet50": trace("resnet50", 224),
        "shufflenetv2": trace(shufflenet(), 32, unfused),
        "bert_base_uncased": trace(Bert(), Sample((384, 768), torch.float32), unfused),
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
                graph=Graph.empty(int(key[1])),
                optimizer=Optimizer.ADAM,
                kernels=steps[key[0]].kernels,
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


class ShuffleUnit(nn.Module):
    """ShuffleNet unit: half of the channels bypass the convolutions, then all are shuffled."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.splits = stride == 1 and inputs == outputs
        inner, half = inputs // 2 if self.splits else inputs, outputs // 2

        def pointwise(before: int, after: int) -> list[nn.Module]:
            return [nn.Conv2d(before, after, 1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]

        def depthwise(width: int) -> list[nn.Module]:
            layer = nn.Conv2d(width, width, 3, stride, 1, groups=width)
            return [layer, nn.BatchNorm2d(width)]

        self.residual = nn.Sequential(
            *pointwise(inner, inner), *depthwise(inner), *pointwise(inner, half)
        )
        self.shortcut = nn.Sequential()
        if not self.splits:
            self.shortcut = nn.Sequential(*depthwise(inputs), *pointwise(inputs, half))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1) if self.splits else (x, x)
        x = torch.cat([self.shortcut(left), self.residual(right)], 1)
        batch, width, height, across = x.shape
        return (
            x.view(batch, 2, width // 2, height, across)
            .transpose(1, 2)
            .contiguous()
            .view(batch, width, height, across)
        )


def shufflenet() -> nn.Module:
    """ShuffleNet V2 for images of 32 px."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24)]
    width = 24
    for wider, repeated in ((116, 3), (232, 7), (464, 3)):
        layers.append(ShuffleUnit(width, wider, 2))
        layers += [ShuffleUnit(wider, wider, 1) for _ in range(repeated)]
        width = wider
    layers += [nn.Conv2d(width, 1024, 1), nn.BatchNorm2d(1024), nn.ReLU(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 100)]
    return nn.Sequential(*layers)


class UnfusedAttention(nn.Module):
    """Twelve heads of 64, with a matrix of scores in memory, as before fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(768, 768) for _ in range(3))
        self.out, self.norm = nn.Linear(768, 768), nn.LayerNorm(768)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = [
            layer(x).view(batch, length, 12, 64).permute(0, 2, 1, 3)
            for layer in (self.query, self.key, self.value)
        ]
        scores = torch.matmul(heads[0], heads[1].transpose(-1, -2)) / 8.0
        scores = scores + torch.zeros(1, 1, 1, length, device=x.device)  # the mask
        mixed = torch.matmul(self.dropout(scores.softmax(-1)), heads[2])
        joined = mixed.permute(0, 2, 1, 3).contiguous().view(batch, length, 768)
        return self.norm(self.dropout(self.out(joined)) + x)


class FeedForward(nn.Module):
    """Feed-forward block of width 3072."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(768, 3072), nn.Linear(3072, 768)
        self.norm, self.dropout = nn.LayerNorm(768), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.narrow(functional.gelu(self.wide(x)))) + x)


class Bert(nn.Module):
    """BERT-base without its embedding, for 384 embedded tokens of width 768."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.LayerNorm(768), nn.Dropout(0.1))
        self.layers = nn.Sequential(
            *(part() for _ in range(12) for part in (UnfusedAttention, FeedForward))
        )
        self.out = nn.Linear(768, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.start(x))).mean(1)
