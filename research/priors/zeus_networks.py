"""The networks of Zeus's traces that timm has not, as modules: structures alone, nothing trained.

`shufflenet` is ShuffleNet V2 (Ma et al. 2018) as it is common for CIFAR: 3x3 of stride 1 at the
start, no pooling before the end. `bert` is BERT-base with sequences of 384 tokens, as is usual for
SQuAD, without its embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ShuffleUnit(nn.Module):
    """Half of the channels passes by, and then they are shuffled."""

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
    """Takes images of 32 px."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24)]
    width = 24
    for wider, repeated in ((116, 3), (232, 7), (464, 3)):
        layers.append(ShuffleUnit(width, wider, 2))
        layers += [ShuffleUnit(wider, wider, 1) for _ in range(repeated)]
        width = wider
    layers += [nn.Conv2d(width, 1024, 1), nn.BatchNorm2d(1024), nn.ReLU(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 100)]
    return nn.Sequential(*layers)


class Attention(nn.Module):
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
    """Of width 3072."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(768, 3072), nn.Linear(3072, 768)
        self.norm, self.dropout = nn.LayerNorm(768), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.narrow(functional.gelu(self.wide(x)))) + x)


class Bert(nn.Module):
    """Takes 384 embedded tokens of width 768."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.LayerNorm(768), nn.Dropout(0.1))
        self.layers = nn.Sequential(
            *(part() for _ in range(12) for part in (Attention, FeedForward))
        )
        self.out = nn.Linear(768, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.start(x))).mean(1)
