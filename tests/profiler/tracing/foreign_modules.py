"""Modules that nobody wrote for TraPPM, as people write theirs: small, and with their inputs.

Hugging Face's models and torchvision's are made from configurations, without weights.
`test_foreign_modules.py` checks what is answered about each against a real step on the CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import foreign_layers as layers
import torch
from torch import Tensor, nn

BATCH_SIZE = 4
"""Of the examples, and of real steps."""
TRANSFORMERS = importlib.util.find_spec("transformers") is not None
NO_TRANSFORMERS = "needs transformers: pip install 'trappm[transformers]'"


@dataclass(frozen=True)
class Foreign:
    """A module, what it is called with, and what is to be answered."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    """At a batch size: a tensor, a tuple of arguments, or a dictionary of keywords."""
    loss: Callable[[Any], Tensor] | None = None
    estimate: dict[str, Any] = field(default_factory=dict)
    """Further settings of the question."""
    cpu_differs: str = ""
    """Why a CPU keeps other tensors than a GPU, where it does."""
    is_recurrent: bool = False
    """True if cuDNN computes it, and more than a CPU: a test of their own."""
    by_values: bool = False
    """True if its operators depend on values, so that the example itself runs."""
    peak_differs: str = ""
    """Why its live memory peaks elsewhere."""

    @property
    def needs_a_choice(self) -> bool:
        """Return whether its answer is not at all batch sizes, or not compared with a real step."""
        return self.by_values or bool(self.cpu_differs or self.estimate)

    @property
    def has_fused_attention(self) -> bool:
        """Return whether it runs kernels whose backward pass is another on a CPU."""
        words = ("Transformer", "BERT")
        return any(word in self.name for word in words)

    def call(self, batch_size: int = BATCH_SIZE) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords at a batch size."""
        torch.manual_seed(0)
        given = self.inputs(batch_size)
        if isinstance(given, dict):
            return (), given
        return given if isinstance(given, tuple) else (given,), {}


def seeded(build):
    """Build with the same weights each time, which decide about the step."""

    def build_seeded():
        torch.manual_seed(0)
        return build()

    return build_seeded


def rand(*shape):
    return lambda batch_size: torch.rand(batch_size, *shape)


def tokens(length):
    return lambda batch_size: torch.randint(64, (batch_size, length))


def pair(*shape):
    return lambda batch_size: (torch.rand(batch_size, *shape), torch.rand(batch_size, *shape))


def bert():
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def masked_tokens(batch_size):
    """Token ids, which are the labels as well, and a mask that hides none of them."""
    ids = tokens(32)(batch_size)
    mask = torch.ones(batch_size, 32, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


MODULES = (
    Foreign("nn.Transformer",
            lambda: nn.Transformer(64, 4, 2, 2, 128, dropout=0.0, batch_first=True), pair(32, 64)),
    Foreign("U-Net with skip connections", layers.UNet, rand(3, 32, 32)),
    Foreign("GAN step: generator through discriminator, two backward passes",
            lambda: layers.GanStep(
                generator=nn.Sequential(
                    nn.ConvTranspose2d(16, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
                    nn.ConvTranspose2d(16, 3, 4, stride=4), nn.Tanh()),
                discriminator=nn.Sequential(
                    nn.Conv2d(3, 16, 4, stride=4), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4),
                    nn.Flatten())),
            lambda b: (torch.rand(b, 16), torch.rand(b, 3, 16, 16))),
    Foreign("LSTM language model", lambda: layers.LanguageModel(nn.LSTM), tokens(16),
            cpu_differs="cuDNN keeps a reserve of its own", is_recurrent=True),
    Foreign("torch.utils.checkpoint, reentrant", layers.Checkpointed,
            rand(3, 16, 16)),
    Foreign("in-place operators", lambda: layers.InPlace(
                first=nn.Conv2d(3, 8, 3, bias=False), second=nn.Conv2d(8, 8, 3, padding=1)),
            rand(3, 16, 16)),
    Foreign("frozen backbone", lambda: layers.Pooled(
                backbone=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
                                       ).requires_grad_(False),
                head=nn.Linear(8, 4)),
            rand(3, 16, 16)),
    Foreign("3-D convolutions", lambda: nn.Sequential(
                nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2),
                nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
                nn.Linear(16, 4)),
            rand(1, 8, 16, 16)),
    Foreign("message passing over edges (index_add)",
            lambda: layers.Edges(message=nn.Linear(16, 16), update=nn.Linear(32, 16)),
            lambda b: (torch.rand(b * 10, 16), torch.randint(10 * b, (2, b * 40)))),
    Foreign("routed experts", seeded(layers.Experts), rand(8, 16), by_values=True),
    Foreign("parameters in bf16",
            lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).bfloat16(),
            lambda b: torch.rand(b, 32, dtype=torch.bfloat16)),
    Foreign("channels-last U-Net",
            lambda: layers.UNet().to(memory_format=torch.channels_last),
            lambda b: torch.rand(b, 3, 32, 32).contiguous(memory_format=torch.channels_last),
            estimate={"memory_format": "channels-last"},
            peak_differs="a GPU copies what is not channels-last"),
    Foreign("Hugging Face BERT", bert, masked_tokens),
)  # fmt: skip
BY_NAME = {foreign.name: foreign for foreign in MODULES}
