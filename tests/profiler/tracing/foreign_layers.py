"""Small networks as they stand in tutorials and papers, for `foreign_modules`."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def _double(fan_in: int, fan_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(inplace=True),
        nn.Conv2d(fan_out, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """After Ronneberger, Fischer and Brox (2015), two levels deep."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deeper, self.bottom = _double(3, 8), _double(8, 16), _double(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.joined = _double(32, 16)
        self.up_again = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.joined_again = _double(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        second = self.deeper(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        x = self.joined(torch.cat([second, self.up(bottom)], 1))
        return self.head(self.joined_again(torch.cat([first, self.up_again(x)], 1)))


class GanStep(nn.Module):
    """The step of a GAN: the discriminator's backward pass, then the generator's through it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(16, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, stride=4), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 16, 4, stride=4), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4), nn.Flatten(),
        )  # fmt: skip

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise[:, :, None, None])
        apart = self.discriminator(real), self.discriminator(fake.detach())
        loss = F.softplus(-apart[0]).mean() + F.softplus(apart[1]).mean()
        loss.backward()
        return F.softplus(-self.discriminator(fake)).mean()


class Siamese(nn.Module):
    """Two images through one network, with a contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 16)
        )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        distance = F.pairwise_distance(self.body(left), self.body(right))
        return F.relu(1 - distance).square().mean()


class Named(nn.Module):
    """Returns a dictionary, the loss among other things."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x)
        scores = self.head(features.mean((2, 3)))
        return {"features": features, "scores": scores, "loss": scores.logsumexp(1).mean()}


class Keywords(nn.Module):
    """Takes tensors and a number, by their names only."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(16, 16, 4)

    def forward(self, *, left: Tensor, right: Tensor, scale: float) -> Tensor:
        return self.both(left, right) * scale


class LanguageModel(nn.Module):
    """Embedding, recurrent layers, scores of every next word."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.recurrent = layer(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 64)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(words))[0])


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` of a sequence with itself, its weights not returned."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 8, 1))
            for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.mean((2, 3))


class InPlace(nn.Module):
    """Writes into what it has just made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.first(x))
        y = self.second(x)
        y.add_(x).clamp_(min=0).mul_(0.5)
        y[:, 0] = 0
        return y.mean((2, 3))


class Frozen(nn.Module):
    """A backbone that does not learn under a head that does."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
        ).requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).mean((2, 3)))


class Autoencoder(nn.Module):
    """A variational one (Kingma and Welling, 2013), which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, 1)
        sample = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
        rebuilt = F.mse_loss(self.decoder(sample), x, reduction="sum")
        return rebuilt - 0.5 * torch.sum(1 + spread - mean.square() - spread.exp())


class Fourier(nn.Module):
    """A layer of a Fourier neural operator (Li et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8, 9, dtype=torch.cfloat))
        self.skip = nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)[..., :9]
        mixed = torch.einsum("bif,iof->bof", spectrum, self.weight)
        return F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.skip(x)).mean(-1)


class Video(nn.Module):
    """Convolutions over time and space."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2),
            nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
            nn.Linear(16, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Edges(nn.Module):
    """A graph network: messages along edges, summed at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(16, 16), nn.Linear(32, 16)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sent = F.relu(self.message(nodes[edges[0]]))
        received = torch.zeros_like(nodes).index_add(0, edges[1], sent)
        return self.update(torch.cat([nodes, received], 1)).square().mean()


class SparseEmbedding(nn.Module):
    """An embedding whose gradient is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16, sparse=True)
        self.head = nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words).mean(1))
