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
import torch.nn.functional as F  # noqa: N812
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
    refusal: str | None = None
    """A regular expression of the one line that is said instead of an answer."""
    cpu_differs: str = ""
    """Why a CPU keeps other tensors than a GPU, where it does."""
    is_recurrent: bool = False
    """True if cuDNN computes it, and more than a CPU: a test of their own."""
    is_pairwise: bool = False
    """True if it compares all samples, and so is another step at every batch size."""
    by_values: bool = False
    """True if its operators depend on values, so that the example itself runs."""
    is_random: bool = False
    """True if it draws the sizes of some tensors, so that no two steps are equal."""
    peak_differs: str = ""
    """Why its live memory peaks elsewhere."""
    is_slow: bool = False

    @property
    def has_fused_attention(self) -> bool:
        """Return whether it runs kernels whose backward pass is another on a CPU."""
        words = ("Transformer", "Attention", "Llama", "BERT", "Whisper", "CLIP", "T5")
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


def labelled(batch_size):
    """Token ids, which are the labels as well, so that the model computes its own loss."""
    ids = tokens(32)(batch_size)
    return {"input_ids": ids, "labels": ids}


def sentences(batch_size):
    """Return words, and the lengths of their sentences."""
    lengths = torch.arange(batch_size) % 7 + 6
    return torch.randint(64, (batch_size, int(lengths.max()))), lengths


def hidden_words(batch_size):
    """Return words, and those of them that are predicted."""
    words = torch.randint(64, (batch_size, 12))
    return words, torch.where(torch.rand(batch_size, 12) < 0.3, words, -100)


def nodes_and_edges(batch_size):
    """Return nodes and edges, some of which are loops."""
    edges = torch.randint(10 * batch_size, (2, 40 * batch_size))
    edges[1, :3] = edges[0, :3]
    return torch.rand(10 * batch_size, 8), edges


def graph_net(name):
    def build():
        from torch_geometric import nn as geometric

        kind = getattr(geometric, name)
        return layers.GraphNet(first=kind(8, 16), second=kind(16, 3))

    return build


def scenes(batch_size):
    target = {
        "boxes": torch.tensor([[4.0, 4.0, 60.0, 60.0], [10.0, 20.0, 50.0, 90.0]]),
        "labels": torch.tensor([1, 2]),
    }
    images = [torch.rand(3, 128, 128) for _ in range(batch_size)]
    return images, [dict(target) for _ in range(batch_size)]


def torchvision(group, name, **options):
    """Build a model of torchvision without dropout, of which a CPU keeps another mask."""

    def build():
        from torchvision import models

        options.setdefault("num_classes", 5)
        model = getattr(getattr(models, group), name)(weights=None, **options)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return build


def pixels(output):
    """Segmentation with an auxiliary head, as torchvision's reference trains it."""
    shape = output["out"].shape
    target = torch.zeros(shape[0], *shape[2:], dtype=torch.long, device=output["out"].device)
    return F.cross_entropy(output["out"], target) + 0.5 * F.cross_entropy(output["aux"], target)


def hugging_face(kind, config, *, checkpointing=False, **options):
    def build():
        import transformers

        model = getattr(transformers, kind)(getattr(transformers, config)(**options))
        if checkpointing:
            model.gradient_checkpointing_enable()
        return model

    return build


LLAMA = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BERT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip

MODULES = (
    Foreign("torchvision ssdlite320_mobilenet_v3_large, training",
            torchvision("detection", "ssdlite320_mobilenet_v3_large", weights_backbone=None),
            scenes, by_values=True, is_random=True),
    Foreign("torchvision fcn_resnet50 with auxiliary loss",
            torchvision("segmentation", "fcn_resnet50", weights_backbone=None, aux_loss=True),
            rand(3, 64, 64), loss=pixels, is_slow=True),
    Foreign("torchvision r3d_18 (video)", torchvision("video", "r3d_18"), rand(3, 8, 32, 32),
            is_slow=True),
    Foreign("nn.Transformer",
            lambda: nn.Transformer(64, 4, 2, 2, 128, dropout=0.0, batch_first=True), pair(32, 64)),
    Foreign("nn.MultiheadAttention", lambda: layers.SelfAttention(
                attention=nn.MultiheadAttention(64, 4, batch_first=True)), rand(32, 64)),
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
    Foreign("Siamese net of two inputs", lambda: layers.Siamese(body=nn.Sequential(
                nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 16))),
            pair(3, 16, 16)),
    Foreign("module that returns a dict", lambda: layers.Named(
                body=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), head=nn.Linear(8, 4)),
            rand(3, 16, 16)),
    Foreign("module with keywords", lambda: layers.Keywords(both=nn.Bilinear(16, 16, 4)),
            lambda b: {"left": torch.rand(b, 16), "right": torch.rand(b, 16), "scale": 2.0}),
    Foreign("LSTM language model", lambda: layers.LanguageModel(nn.LSTM), tokens(16),
            cpu_differs="cuDNN keeps a reserve of its own", is_recurrent=True),
    Foreign("GRU language model", lambda: layers.LanguageModel(nn.GRU), tokens(16),
            cpu_differs="cuDNN keeps a reserve of its own", is_recurrent=True),
    Foreign("torch.utils.checkpoint, not reentrant", lambda: layers.Checkpointed(False),
            rand(3, 16, 16)),
    Foreign("torch.utils.checkpoint, reentrant", lambda: layers.Checkpointed(True),
            rand(3, 16, 16)),
    Foreign("weight norm", lambda: nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)), nn.ReLU(),
                nn.utils.parametrizations.weight_norm(nn.Linear(32, 8))),
            rand(16)),
    Foreign("spectral norm", lambda: nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)), nn.LeakyReLU(0.1),
                nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(8 * 36, 1))),
            rand(3, 8, 8)),
    Foreign("in-place operators", lambda: layers.InPlace(
                first=nn.Conv2d(3, 8, 3, bias=False), second=nn.Conv2d(8, 8, 3, padding=1)),
            rand(3, 16, 16)),
    Foreign("frozen backbone", lambda: layers.Pooled(
                backbone=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
                                       ).requires_grad_(False),
                head=nn.Linear(8, 4)),
            rand(3, 16, 16)),
    Foreign("variational autoencoder", lambda: layers.Autoencoder(
                encoder=nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)),
                decoder=nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))),
            rand(64)),
    Foreign("Fourier layer (FFT)", lambda: layers.Fourier(
                weight=nn.Parameter(torch.rand(8, 8, 9, dtype=torch.cfloat)),
                skip=nn.Conv1d(8, 8, 1)),
            rand(8, 32)),
    Foreign("3-D convolutions", lambda: nn.Sequential(
                nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2),
                nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
                nn.Linear(16, 4)),
            rand(1, 8, 16, 16)),
    Foreign("message passing over edges (index_add)",
            lambda: layers.Edges(message=nn.Linear(16, 16), update=nn.Linear(32, 16)),
            lambda b: (torch.rand(b * 10, 16), torch.randint(10 * b, (2, b * 40)))),
    Foreign("packed LSTM", lambda: layers.PackedTagger(
                embedding=nn.Embedding(64, 16), head=nn.Linear(64, 5),
                lstm=nn.LSTM(16, 32, bidirectional=True, batch_first=True)),
            sentences, by_values=True, is_recurrent=True, cpu_differs="cuDNN's reserve space"),
    Foreign("routed experts", seeded(layers.Experts), rand(8, 16), by_values=True),
    Foreign("words behind a mask, Attention", lambda: layers.MaskedWords(
                embedding=nn.Embedding(64, 16), head=nn.Linear(16, 64),
                attention=nn.MultiheadAttention(16, 2, batch_first=True)),
            hidden_words, by_values=True),
    Foreign("NumPy and .item()",
            lambda: layers.Sorted(norm=nn.BatchNorm1d(8), head=nn.Linear(8, 3)), rand(8),
            by_values=True),
    Foreign("as often as a score says, Attention", seeded(layers.Halting), rand(8, 16),
            by_values=True,
            cpu_differs="its result was saved for the score, which wants no gradient"),
    *(Foreign(f"PyTorch Geometric {layer}", graph_net(layer), nodes_and_edges, by_values=True)
      for layer in ("GCNConv", "GATConv")),
    Foreign("nn.Embedding(sparse=True)",
            lambda: nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Linear(16, 4)),
            tokens(16), refusal="sparse"),
    Foreign("parameters in bf16",
            lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).bfloat16(),
            lambda b: torch.rand(b, 32, dtype=torch.bfloat16)),
    Foreign("channels-last U-Net",
            lambda: layers.UNet().to(memory_format=torch.channels_last),
            lambda b: torch.rand(b, 3, 32, 32).contiguous(memory_format=torch.channels_last),
            estimate={"memory_format": "channels-last"},
            peak_differs="a GPU copies what is not channels-last"),
    Foreign("Hugging Face GPT-2", hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2), labelled),
    Foreign("Hugging Face GPT-2, gradient checkpointing",
            hugging_face("GPT2LMHeadModel", "GPT2Config", checkpointing=True, **GPT2), labelled),
    Foreign("Hugging Face Llama, grouped queries",
            hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA), labelled),
    Foreign("Hugging Face BERT", hugging_face("BertForMaskedLM", "BertConfig", **BERT),
            lambda b: {**labelled(b), "attention_mask": torch.ones(b, 32, dtype=torch.long)}),
    Foreign("Hugging Face T5",
            hugging_face(
                "T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=64, d_kv=16,
                d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0),
            labelled, cpu_differs="its position bias wants a gradient, and a CPU has no fused "
                                  "attention for that"),
    Foreign("Hugging Face Whisper",
            hugging_face(
                "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=64, d_model=64,
                encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
                num_mel_bins=16, max_source_positions=32, max_target_positions=32, pad_token_id=0,
                bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
                begin_suppress_tokens=None, dropout=0.0),
            lambda b: {"input_features": torch.rand(b, 16, 64),
                       "labels": torch.randint(64, (b, 32))}),
    Foreign("Hugging Face CLIP, contrastive loss",
            hugging_face(
                "CLIPModel", "CLIPConfig", projection_dim=16,
                text_config={**TOWER, "vocab_size": 64, "max_position_embeddings": 32,
                             "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 2},
                vision_config={**TOWER, "image_size": 32, "patch_size": 8}),
            lambda b: {"input_ids": torch.randint(64, (b, 16)),
                       "pixel_values": torch.rand(b, 3, 32, 32), "return_loss": True},
            is_pairwise=True),
)  # fmt: skip
BY_NAME = {foreign.name: foreign for foreign in MODULES}
