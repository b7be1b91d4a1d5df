"""Published steps of Hugging Face models: fine-tuning, short passes, eager and compiled inference.

Rows of other models and settings are left out: fused kernels of fms-acceleration (foak, liger) and
its GPTQ weights, experts, and the longer names of the compiled pairs, whose heads are not covered.
Targets and dropout of LoRA are those of peft's defaults, of which fms-acceleration adapts two more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

import trappm
from research.peers.cost_models import STEP, Figure, Figures, config_folder
from trappm.extensions.parallel.schedules import ShardingStrategy
from trappm.extensions.parallel.shared_step import predict_parallel
from trappm.profiler.records import Execution, Phase, Precision

EAGER, COMPILED = "eager, ms", "compiled, ms"
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_bigcode-santacoder": {
        "model_type": "gpt_bigcode", "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner": 8192,
        "n_positions": 2048, "vocab_size": 49280, "multi_query": True,
    },
    "PowerLM-3b": {
        "model_type": "granite", "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 40, "num_attention_heads": 36, "num_key_value_heads": 36,
        "vocab_size": 49152, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
    "phi-1.5 1.3B": {
        "model_type": "phi", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 51200,
    },
    "StableLM Alpha 3B": {
        "model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384,
        "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 50688,
        "max_position_embeddings": 4096,
    },
    "google/vit-base-patch16-224": {"model_type": "vit", "num_labels": 1000},
    "microsoft/beit-base-patch16-224-pt22k-ft22k": {
        "model_type": "beit", "num_labels": 21841, "use_relative_position_bias": True,
        "use_mask_token": False,
    },
    "facebook/convnext-large-224": {
        "model_type": "convnext", "hidden_sizes": [192, 384, 768, 1536], "depths": [3, 3, 27, 3],
        "num_labels": 1000,
    },
    "microsoft/resnet-50": {"model_type": "resnet", "num_labels": 1000},
}  # fmt: skip
BUILT_IN = {
    "Mistral-7B-v0.1": "hf:mistral-7b",
    "Llama-2-70b-hf": "hf:llama-2-70b",
    "Llama 2 13B": "hf:llama-2-13b",
}
FRAMEWORKS = ("none", "baseline-peft-bnb", "accelerated-peft-bnb")
"""Configurations of fms-acceleration without fused kernels and experts."""
LORA_RANK = {"fms": 16, "litgpt": 8}
GLOBAL_BATCH = 128
"""Samples per optimizer step of litgpt."""
TEXT_TOKENS = 128
"""Assumed length of a text of Alpaca; the source has the longest one only."""


def _name(model: str) -> str:
    if model in BUILT_IN:
        return BUILT_IN[model]
    file = Path(config_folder()) / f"{model.replace('/', '-').replace(' ', '-')}.json"
    file.write_text(json.dumps(SHAPES[model]))
    return f"hf:{file}"


def read_fine_tuning(file: Path) -> pd.DataFrame:
    """Return fms-acceleration's runs of `FRAMEWORKS` on one A100 and on several."""
    sheet = pd.read_csv(file)
    sheet = sheet.assign(
        card="a100-80gb",
        model=sheet.model_name_or_path.str.split("/").str[1],
        framework=sheet.framework_config,
        gpus=sheet.num_gpus.astype(int),
        batch=sheet.per_device_train_batch_size.astype(int),
    )
    known = sheet.model.isin([*SHAPES, *BUILT_IN]) & sheet.framework.isin(FRAMEWORKS)
    sheet = sheet[known & sheet.train_tokens_per_second.notna()]
    tokens = sheet.model.map(lambda model: SHAPES.get(model, {}).get("n_positions", 4096))
    step_ms = 1000 * sheet.batch * tokens / sheet.train_tokens_per_second
    return sheet.assign(
        tokens=tokens, one=step_ms.where(sheet.gpus == 1), several=step_ms.where(sheet.gpus > 1)
    )


ONE_GPU, FSDP = f"{STEP}, one GPU", f"{STEP}, FSDP"


def fine_tuning_ours(row: Any) -> Figures:
    """Predict a run; FSDP casts to 16 bits, so `baseline` has autocast on one GPU only."""
    options = f",lora={LORA_RANK['fms']}" if row.peft_method == "lora" else ""
    if "bnb" in row.framework:
        options = f",qlora={LORA_RANK['fms']}"
    is_cast = "baseline" in row.framework and row.gpus == 1
    result = predict_parallel(
        f"{_name(row.model)}{options},checkpointing",
        device=row.card,
        gpus=row.gpus,
        strategy=ShardingStrategy.FSDP if row.gpus > 1 else ShardingStrategy.DDP,
        batch_size=row.batch,
        sequence_length=row.tokens,
        precision=Precision.AMP_BF16 if is_cast else Precision.BF16,
        optimizer="adamw",
    )
    return dict.fromkeys(
        (ONE_GPU, FSDP), Figure(result.step_time_ms, *result.intervals["step_time_ms"])
    )


def read_short_passes(file: Path) -> pd.DataFrame:
    """Return litgpt's LoRA and QLoRA of Alpaca on one A100 and on several (FSDP)."""
    sheet = pd.read_csv(file)
    sheet = sheet[sheet.source.str.endswith("litgpt") & (sheet.method == "lora")]
    sheet = sheet[sheet.iter_s.notna()]
    pass_ms = 1000 * sheet.iter_s
    return sheet.assign(
        card="a100-40gb",
        one=pass_ms.where(sheet.n_gpus == 1),
        several=pass_ms.where(sheet.n_gpus > 1),
    )


def short_passes_ours(row: Any) -> Figures:
    """Predict a pass; several GPUs run FSDP with checkpoints."""
    quantized = "q" if isinstance(row.quantization, str) else ""
    is_shared = row.n_gpus > 1
    passes = GLOBAL_BATCH // int(row.micro_batch * row.n_gpus)
    result = predict_parallel(
        f"{_name(row.model)},{quantized}lora={LORA_RANK['litgpt']}"
        + (",checkpointing" if is_shared else ""),
        device=row.card,
        gpus=int(row.n_gpus),
        strategy=ShardingStrategy.FSDP if is_shared else ShardingStrategy.DDP,
        accumulation=passes,
        batch_size=int(row.micro_batch),
        sequence_length=TEXT_TOKENS,
        precision=Precision.BF16,
        optimizer="adamw",
    )
    times = (result.step_time_ms, *result.intervals["step_time_ms"])
    return dict.fromkeys((ONE_GPU, FSDP), Figure(*(time / passes for time in times)))


def read_pairs(file: Path) -> pd.DataFrame:
    """Return inference in fp32 of transformers' image models, eager and compiled.

    Steps with CUDA graphs (`reduce-overhead`) and models with other heads are left out.
    """
    sheet = pd.read_csv(file)
    sheet = sheet[sheet.model.isin(list(SHAPES)) & (sheet["mode"] == "default")]
    return sheet.assign(card=sheet.card.str.lower(), batch=sheet.batch_size.astype(int))


def pairs_ours(row: Any) -> Figures:
    """Predict a step in both ways, with the attention of transformers before 2024."""
    figures = {}
    for quantity, execution in ((EAGER, Execution.EAGER), (COMPILED, Execution.COMPILE)):
        result = trappm.predict(
            f"{_name(row.model)},eager", device=row.card, batch_size=row.batch, input_size=224,
            phase=Phase.INFER, precision=Precision.FP32, execution=execution,
        )  # fmt: skip
        assert result.step_time_ms is not None
        figures[quantity] = Figure(result.step_time_ms, *result.intervals["step_time_ms"])
    return figures
