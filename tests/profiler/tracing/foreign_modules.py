"""Modules that nobody wrote for TraPPM, as people write theirs: small, and with their inputs.

Hugging Face's models and torchvision's are made from configurations, without weights.
`test_foreign_modules.py` checks what is answered about each against a real step on the CPU;
`research/tables/foreign_modules.py` prints the table of docs/research/foreign_modules.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from foreign_layers import (
    Autoencoder,
    Checkpointed,
    Edges,
    Fourier,
    Frozen,
    GanStep,
    InPlace,
    Keywords,
    LanguageModel,
    Named,
    SelfAttention,
    Siamese,
    SparseEmbedding,
    UNet,
    Video,
)
from torch import Tensor, nn

from trappm.profiler.models.torchvision_shim import register_missing_operators

BATCH_SIZE = 4
"""Of the examples, and of real steps."""
TRANSFORMERS = importlib.util.find_spec("transformers") is not None
NO_TRANSFORMERS = "needs transformers: pip install 'trappm[transformers]'"


@dataclass(frozen=True, kw_only=True)
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
    peak_differs: str = ""
    """Why its live memory peaks elsewhere."""
    is_slow: bool = False

    @property
    def has_fused_attention(self) -> bool:
        """Return whether it runs kernels whose backward pass is another on a CPU."""
        words = (
            "Transformer",
            "Attention",
            "Llama",
            "Mistral",
            "BERT",
            "Whisper",
            "ViT",
            "CLIP",
            "T5",
        )
        return any(word in self.name for word in words)

    def call(self, batch_size: int = BATCH_SIZE) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords at a batch size."""
        given = self.inputs(batch_size)
        if isinstance(given, dict):
            return (), given
        return given if isinstance(given, tuple) else (given,), {}


def images(size: int, channels: int = 3) -> Callable[[int], Tensor]:
    return lambda batch_size: torch.rand(batch_size, channels, size, size)


def tokens(length: int, words: int = 64) -> Callable[[int], Tensor]:
    return lambda batch_size: torch.randint(words, (batch_size, length))


def sequences(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch_size: torch.rand(batch_size, *shape)


def labelled(length: int, **more: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
    """Token ids, which are the labels as well, so that the model computes its own loss."""

    def inputs(batch_size: int) -> dict[str, Tensor]:
        ids = tokens(length)(batch_size)
        others = {name: make(batch_size) for name, make in more.items()}
        return {"input_ids": ids, "labels": ids, **others}

    return inputs


def _detection(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        register_missing_operators()
        from torchvision.models import detection

        make = getattr(detection, name)
        return make(weights=None, weights_backbone=None, num_classes=5, **options)

    return build


def _scenes() -> Callable[[int], Any]:
    def inputs(batch_size: int) -> Any:
        target = {
            "boxes": torch.tensor([[4.0, 4.0, 60.0, 60.0], [10.0, 20.0, 50.0, 90.0]]),
            "labels": torch.tensor([1, 2]),
        }
        scenes = [torch.rand(3, 128, 128) for _ in range(batch_size)]
        return scenes, [dict(target) for _ in range(batch_size)]

    return inputs


def _torchvision(group: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        register_missing_operators()
        from torchvision import models

        return _without_dropout(getattr(getattr(models, group), name)(weights=None, **options))

    return build


def _without_dropout(model: nn.Module) -> nn.Module:
    """A CPU keeps another mask of it than a GPU."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _pixels(output: Any) -> Tensor:
    """Segmentation with an auxiliary head, as torchvision's reference trains it."""
    target = torch.zeros(
        output["out"].shape[0], *output["out"].shape[2:], dtype=torch.long,
        device=output["out"].device,
    )  # fmt: skip
    loss = F.cross_entropy(output["out"], target)
    return loss + 0.5 * F.cross_entropy(output["aux"], target) if "aux" in output else loss


def _hugging_face(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        register_missing_operators()
        import transformers

        made = getattr(transformers, config)(**options)
        return getattr(transformers, kind)(made)

    return build


def _checkpointed_gpt2() -> nn.Module:
    model: Any = _hugging_face("GPT2LMHeadModel", "GPT2Config", **_GPT2)()
    model.gradient_checkpointing_enable()
    return model


def _clip() -> nn.Module:
    register_missing_operators()
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4}  # fmt: skip
    return CLIPModel(
        CLIPConfig(
            text_config={**tower, "vocab_size": 64, "max_position_embeddings": 32,
                         "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 2},
            vision_config={**tower, "image_size": 32, "patch_size": 8},
            projection_dim=16,
        )
    )  # fmt: skip


_VALUES = r"needs the values of a tensor"
_LLAMA = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 64, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_BERT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

MODULES: tuple[Foreign, ...] = (
    *(
        Foreign(
            name=f"torchvision {name}, training",
            build=_detection(name, **options),
            inputs=_scenes(),
            refusal=rf"torchvision/models/detection/\w+\.py:\d+ {_VALUES}",
        )
        for name, options in (
            ("fasterrcnn_resnet50_fpn", {}),
            ("ssdlite320_mobilenet_v3_large", {}),
        )
    ),
    Foreign(
        is_slow=True,
        name="torchvision fcn_resnet50 with auxiliary loss",
        build=_torchvision("segmentation", "fcn_resnet50", weights_backbone=None, aux_loss=True,
                           num_classes=5),
        inputs=images(64),
        loss=_pixels,
    ),
    Foreign(
        is_slow=True,
        name="torchvision r3d_18 (video)",
        build=_torchvision("video", "r3d_18", num_classes=5),
        inputs=sequences(3, 8, 32, 32),
    ),
    Foreign(
        name="nn.Transformer",
        build=lambda: nn.Transformer(64, 4, 2, 2, 128, dropout=0.0, batch_first=True),
        inputs=lambda b: (torch.rand(b, 32, 64), torch.rand(b, 32, 64)),
    ),
    Foreign(
        name="nn.MultiheadAttention",
        build=lambda: SelfAttention(64, 4),
        inputs=sequences(32, 64),
    ),
    Foreign(name="U-Net with skip connections", build=UNet, inputs=images(32)),
    Foreign(
        name="GAN step: generator through discriminator, two backward passes",
        build=GanStep,
        inputs=lambda b: (torch.rand(b, 16), torch.rand(b, 3, 16, 16)),
    ),
    Foreign(
        name="Siamese net of two inputs",
        build=Siamese,
        inputs=lambda b: (torch.rand(b, 3, 16, 16), torch.rand(b, 3, 16, 16)),
    ),
    Foreign(name="module that returns a dict", build=Named, inputs=images(16)),
    Foreign(
        name="module with keywords",
        build=Keywords,
        inputs=lambda b: {"left": torch.rand(b, 16), "right": torch.rand(b, 16), "scale": 2.0},
    ),
    Foreign(
        name="LSTM language model", build=lambda: LanguageModel(nn.LSTM), inputs=tokens(16),
        cpu_differs="cuDNN keeps a reserve of its own",
        is_recurrent=True,
    ),
    Foreign(
        name="GRU language model", build=lambda: LanguageModel(nn.GRU), inputs=tokens(16),
        cpu_differs="cuDNN keeps a reserve of its own",
        is_recurrent=True,
    ),
    Foreign(
        name="torch.utils.checkpoint, not reentrant",
        build=lambda: Checkpointed(use_reentrant=False),
        inputs=images(16),
    ),
    Foreign(
        name="torch.utils.checkpoint, reentrant",
        build=lambda: Checkpointed(use_reentrant=True),
        inputs=images(16),
    ),
    Foreign(
        name="weight norm",
        build=lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)), nn.ReLU(),
            nn.utils.parametrizations.weight_norm(nn.Linear(32, 8)),
        ),
        inputs=sequences(16),
    ),
    Foreign(
        name="spectral norm",
        build=lambda: nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)), nn.LeakyReLU(0.1),
            nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(8 * 36, 1)),
        ),
        inputs=images(8),
    ),
    Foreign(name="in-place operators", build=InPlace, inputs=images(16)),
    Foreign(name="frozen backbone", build=Frozen, inputs=images(16)),
    Foreign(name="variational autoencoder", build=Autoencoder, inputs=sequences(64)),
    Foreign(name="Fourier layer (FFT)", build=Fourier, inputs=sequences(8, 32)),
    Foreign(name="3-D convolutions", build=Video, inputs=sequences(1, 8, 16, 16)),
    Foreign(
        name="message passing over edges (index_add)",
        build=Edges,
        inputs=lambda b: (torch.rand(b * 10, 16), torch.randint(10 * b, (2, b * 40))),
    ),
    Foreign(
        name="nn.Embedding(sparse=True)",
        build=SparseEmbedding,
        inputs=tokens(16),
        refusal="sparse",
    ),
    Foreign(
        name="parameters in bf16",
        build=lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).bfloat16(),
        inputs=lambda b: torch.rand(b, 32, dtype=torch.bfloat16),
    ),
    Foreign(
        name="channels-last U-Net",
        build=lambda: UNet().to(memory_format=torch.channels_last),
        inputs=lambda b: images(32)(b).contiguous(memory_format=torch.channels_last),
        estimate={"memory_format": "channels-last"},
        peak_differs="a GPU copies what is not channels-last",
    ),
    Foreign(
        name="Hugging Face GPT-2",
        build=_hugging_face("GPT2LMHeadModel", "GPT2Config", **_GPT2),
        inputs=labelled(32),
    ),
    Foreign(
        name="Hugging Face GPT-2, gradient checkpointing",
        build=_checkpointed_gpt2,
        inputs=labelled(32),
    ),
    Foreign(
        name="Hugging Face Llama, grouped queries",
        build=_hugging_face("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
        inputs=labelled(32),
    ),
    Foreign(
        name="Hugging Face BERT",
        build=_hugging_face("BertForMaskedLM", "BertConfig", **_BERT),
        inputs=labelled(
            32, attention_mask=lambda b: torch.ones(b, 32, dtype=torch.long)
        ),
    ),
    Foreign(
        cpu_differs="its position bias wants a gradient, and a CPU has no fused attention for that",
        name="Hugging Face T5",
        build=_hugging_face(
            "T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=64, d_kv=16, d_ff=128,
            num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
        ),
        inputs=labelled(32),
    ),
    Foreign(
        name="Hugging Face Whisper",
        build=_hugging_face(
            "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=64, d_model=64,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16,
            max_source_positions=32, max_target_positions=32, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None, dropout=0.0,
        ),
        inputs=lambda b: {
            "input_features": torch.rand(b, 16, 64),
            "labels": torch.randint(64, (b, 32)),
        },
    ),
    Foreign(
        name="Hugging Face CLIP, contrastive loss",
        build=_clip,
        inputs=lambda b: {
            "input_ids": torch.randint(64, (b, 16)),
            "pixel_values": torch.rand(b, 3, 32, 32),
            "return_loss": True,
        },
        is_pairwise=True,
    ),
)  # fmt: skip
BY_NAME = {foreign.name: foreign for foreign in MODULES}
