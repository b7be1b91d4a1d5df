"""Small networks that together have every kind of kernel, convolution and operator."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trappm.learner.interface import Workload
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision, StepSettings
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import ConvolutionKind, TraceSettings

INPUT_SIZE = 32
BATCH_SIZE = 8
WIDTH = 16
WINDOWS = ((1, 1), (1, 2), (4, 4), (2, 1), (3, 1), (3, 2), (5, 1), (7, 1))
"""Of convolutions without groups: height and width, and stride."""
DEPTHWISE_WINDOWS = tuple((window, stride) for window in (3, 5, 7, 11, 13) for stride in (1, 2))
GROUPS = ((8, 32), (16, 32), (8, 2), (16, 2), (32, 2), (64, 2), (96, 2))
"""Channels of a group, and the number of groups."""


class Convolutions(nn.Module):
    """Convolutions of all windows, strides and groups, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, WIDTH, 3, padding=1)]
        for groups, windows in ((1, WINDOWS), (WIDTH, DEPTHWISE_WINDOWS)):
            for window, stride in windows:
                layers.append(nn.Conv2d(WIDTH, WIDTH, window, stride, window // 2, groups=groups))
                layers.append(nn.Upsample(size=INPUT_SIZE))
        width = WIDTH
        for channels, groups in GROUPS:
            layers.append(nn.Conv2d(width, channels * groups, 1))
            width = channels * groups
            layers.append(nn.Conv2d(width, width, 3, padding=1, groups=groups))
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images))


class OtherOperators(nn.Module):
    """What networks compute in addition to convolutions, with a layer of large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.batch_norm, self.group_norm = nn.BatchNorm2d(WIDTH), nn.GroupNorm(4, WIDTH)
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.positions, self.bags = nn.Embedding(64, WIDTH), nn.EmbeddingBag(64, WIDTH)
        self.wide = nn.Linear(WIDTH, 4096)
        self.large = nn.Linear(4096, 4096)
        self.head = nn.Linear(4096, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.group_norm(self.batch_norm(self.stem(images))))
        x = functional.hardswish(functional.relu6(x)) + functional.hardsigmoid(x)
        x = functional.max_pool2d(x, 2) + functional.avg_pool2d(x, 2)
        x = x + x.transpose(2, 3)
        x = functional.interpolate(functional.interpolate(x, size=16), size=8)
        x = functional.gelu(x) * torch.tanh(x) / (1 + x.pow(2)) + torch.zeros_like(x)
        tokens = self.layer_norm(x.flatten(2).transpose(1, 2))
        places = torch.arange(64, device=images.device)
        tokens = tokens + self.positions(places) + self.recurrent(tokens)[0]
        tokens = tokens + self.bags(places.reshape(1, 64))
        heads = tokens.unsqueeze(1)
        tokens = tokens + functional.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
        tokens = tokens.index_select(1, places)
        scores = torch.softmax(tokens @ tokens.transpose(1, 2), dim=-1)
        tokens = torch.einsum("bij,bjk->bik", scores, tokens)
        first, second = tokens.split(32, dim=1)
        tokens = torch.cat([first[:, ::2], second], dim=1)
        return self.head(torch.sigmoid(self.large(self.wide(tokens.mean(1)))))


def one_convolution(kind: ConvolutionKind) -> nn.Module:
    """Return a network of a stem and one convolution of one kind."""
    window = 1 if kind is ConvolutionKind.POINTWISE else 3
    groups = {ConvolutionKind.GROUPED: 2, ConvolutionKind.DEPTHWISE: WIDTH}.get(kind, 1)
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1),
        nn.Conv2d(WIDTH, WIDTH, window, padding=window // 2, groups=groups),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTH, 10),
    )


def in_all_settings(module: nn.Module) -> list[Workload]:
    """Return training and inference in fp32, and training in mixed precision and channels-last."""

    def workload(phase: Phase, **how: Any) -> Workload:
        settings = StepSettings(**how)
        traced = trace(module, INPUT_SIZE, TraceSettings.of(settings), phase)
        return Workload.of(traced, settings, batch_size=BATCH_SIZE, with_kernels=True)

    plain = workload(Phase.TRAIN)
    return [
        plain,
        workload(Phase.INFER),
        workload(
            Phase.TRAIN,
            precision=Precision.AMP_FP16,
            memory_format=MemoryFormat.CHANNELS_LAST,
            optimizer=Optimizer.ADAM,
        ),
        replace(plain, optimizer=Optimizer.MOMENTUM),
    ]
