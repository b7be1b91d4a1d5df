"""Small networks as they stand in tutorials and papers, for `foreign_modules`.

The operators of the last one depend on values.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from small_modules import Parts
from torch import nn
from torch.utils.checkpoint import checkpoint


def double(fan_in, fan_out):
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(inplace=True),
        nn.Conv2d(fan_out, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """After Ronneberger, Fischer and Brox (2015), two levels deep."""

    def __init__(self):
        super().__init__()
        self.down, self.deeper, self.bottom = double(3, 8), double(8, 16), double(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.joined = double(32, 16)
        self.up_again = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.joined_again = double(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        first = self.down(x)
        second = self.deeper(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        x = self.joined(torch.cat([second, self.up(bottom)], 1))
        return self.head(self.joined_again(torch.cat([first, self.up_again(x)], 1)))


class GanStep(Parts):
    """The step of a GAN: the discriminator's backward pass, then the generator's through it."""

    def forward(self, noise, real):
        fake = self.generator(noise[:, :, None, None])
        apart = self.discriminator(real), self.discriminator(fake.detach())
        loss = F.softplus(-apart[0]).mean() + F.softplus(apart[1]).mean()
        loss.backward()
        return F.softplus(-self.discriminator(fake)).mean()


class LanguageModel(nn.Module):
    """Embedding, recurrent layers, scores of every next word."""

    def __init__(self, layer):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.recurrent = layer(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 64)

    def forward(self, words):
        return self.head(self.recurrent(self.embedding(words))[0])


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 8, 1))
            for _ in range(3)
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return x.mean((2, 3))


class InPlace(Parts):
    """Writes into what it has just made."""

    def forward(self, x):
        x = F.relu_(self.first(x))
        y = self.second(x)
        y.add_(x).clamp_(min=0).mul_(0.5)
        y[:, 0] = 0
        return y.mean((2, 3))


class Pooled(Parts):
    """A head on the mean of a backbone's pixels."""

    def forward(self, x):
        return self.head(self.backbone(x).mean((2, 3)))


class Edges(Parts):
    """A graph network: messages along edges, summed at their ends."""

    def forward(self, nodes, edges):
        sent = F.relu(self.message(nodes[edges[0]]))
        received = torch.zeros_like(nodes).index_add(0, edges[1], sent)
        return self.update(torch.cat([nodes, received], 1)).square().mean()


class Experts(nn.Module):
    """Each token goes to the two of its experts with the largest scores."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)
        )

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = torch.topk(self.router(tokens).softmax(-1), 2)
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                output.index_add_(0, rows, weights[rows, place, None] * expert(tokens[rows]))
        return output.view_as(x)
