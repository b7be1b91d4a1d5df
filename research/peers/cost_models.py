"""Predictions of published runs of language models by this package and by optional ones.

Units are ms and GiB. The optional packages are imported when they are used:

    pip install --no-deps --target PEERS llm-analysis fire termcolor
    pip install --target PEERS aiconfigurator
    pip install --no-deps --target PEERS torch-kitsune
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from research.priors import decoding
from trappm.extensions.parallel.schedules import ShardingStrategy
from trappm.extensions.parallel.shared_step import PROCESS, predict_parallel
from trappm.profiler.errors import InputError
from trappm.profiler.models.zoo import create_model
from trappm.profiler.records import Precision

GIB, MIB = 2**30, 2**20
MIB_PER_GIB = 1024
NAN = float("nan")
GPUS_PER_NODE = 8
STEP, TENSORS = "training step, ms", "tensors, GiB"
MEMORY = {"A100": "memory of an A100, GiB", "V100": "memory of a V100, GiB"}
PROMPT, TOKEN = "prompt, ms", "token, ms"


@dataclass(frozen=True)
class Figure:
    """A predicted value with the bounds of its 90 % interval, NaN where none is stated."""

    value: float = NAN
    low: float = NAN
    high: float = NAN


Figures = Mapping[str, Figure]
"""Figures by quantity."""


@dataclass(frozen=True, kw_only=True)
class MegatronRun:
    """A training run of a decoder by Megatron-LM, in 16 bits with Adam."""

    device: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    tokens: int
    batch: int
    passes: int
    gpus: int
    tensor: int
    pipeline: int
    sequence_parallel: bool = False
    options: str = ""
    """Options of the model's name."""
    precision: Precision = Precision.BF16


def simumax_run(row: Any) -> MegatronRun:
    """Return a run of Llama 3 with the sizes, 4,096 tokens and batch of SimuMax's scripts."""
    if not row.model.startswith("llama") or row.cp_size > 1:
        raise InputError("not covered: experts or context parallelism")
    tensor, pipeline = (int(part) for part in row.parallel.removeprefix("tp").split("pp"))
    times = 1 if row.model == "llama3-70b" else 2
    return MegatronRun(
        device="b200", model_type="llama", layers=row.layer_num, vocabulary=128_256, tokens=4096,
        hidden=8192 * times, heads=64 * times, kv_heads=8 * times, batch=1, passes=row.mbc,
        feed_forward=28672 if times == 1 else 53248, gpus=GPUS_PER_NODE, tensor=tensor,
        pipeline=pipeline, sequence_parallel=True,
    )  # fmt: skip


def bigscience_run(row: Any) -> MegatronRun:
    hidden, heads = int(row.hidden), int(row.heads)
    return MegatronRun(
        device=row.device.lower(), model_type="gpt2", hidden=hidden, layers=int(row.layers),
        heads=heads, kv_heads=heads, feed_forward=4 * hidden, tokens=int(row.seq_len),
        vocabulary=250_880 if "176B" in row.source_path else 50_304, batch=int(row.micro_batch),
        passes=int(row.global_batch // (row.micro_batch * row.dp)), gpus=int(row.n_gpus),
        tensor=int(row.tp), pipeline=int(row.pp),
        options=("" if str(row.act_ckpt) == "False" else ",checkpointing") + ",megatron",
        precision=Precision.BF16 if row.precision == "bf16" else Precision.AMP_FP16,
    )  # fmt: skip


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="costbench-")


def config_folder() -> str:
    """Return the folder of the configurations of models, which is deleted at exit."""
    return _folder().name


def predicted_run(run: MegatronRun) -> Figures:
    """Predict a run by the public API."""
    hidden, layers, heads, tokens = run.hidden, run.layers, run.heads, run.tokens
    name = (run.model_type, hidden, layers, heads, run.vocabulary, tokens)
    file = Path(config_folder()) / f"{'-'.join(map(str, name))}.json"
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "max_position_embeddings": tokens, "intermediate_size": run.feed_forward,
        "num_key_value_heads": run.kv_heads,
    }  # fmt: skip
    if run.model_type == "gpt2":
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": tokens}
    file.write_text(
        json.dumps({"model_type": run.model_type, "vocab_size": run.vocabulary, **sizes})
    )
    is_divided = run.tensor * run.pipeline > 1
    result = predict_parallel(
        f"hf:{file}{run.options}",
        device=run.device,
        gpus=min(run.gpus, GPUS_PER_NODE),
        nodes=max(run.gpus // GPUS_PER_NODE, 1),
        strategy=ShardingStrategy.TP if is_divided else ShardingStrategy.DDP,
        tensor=run.tensor if is_divided else None,
        pipeline=run.pipeline,
        accumulation=run.passes,
        sharded_optimizer=True,
        sequence_parallel=run.sequence_parallel and is_divided,
        batch_size=run.batch,
        sequence_length=tokens,
        precision=run.precision,
        optimizer="adamw",
    )
    assert result.memory_mib is not None
    values = (result.memory_mib, *result.intervals["memory_mib"])
    tensors_mib = sum(v for part, v in result.memory_parts_mib.items() if part != PROCESS)
    return {
        STEP: Figure(result.step_time_ms, *result.intervals["step_time_ms"]),
        TENSORS: Figure(tensors_mib / MIB_PER_GIB),
        **dict.fromkeys(MEMORY.values(), Figure(*(value / MIB_PER_GIB for value in values))),
    }


def llm_analysis(run: MegatronRun) -> Figures:
    """Run llm-analysis with ZeRO-1, states in fp32 and the FLOP efficiency of its source, 0.5.

    It counts two products per feed-forward, so a gated one is entered 1.5 times as wide.
    """
    from llm_analysis import analysis, config

    analysis.logger.setLevel(logging.ERROR)
    wide = run.feed_forward * (1.5 if run.model_type == "llama" else 1)
    model = config.ModelConfig(
        "", run.layers, run.heads, run.hidden, run.vocabulary, run.tokens, run.kv_heads,
        ffn_embed_dim=wide, expansion_ratio=wide / run.hidden,
    )  # fmt: skip
    gpu = config.GPUConfig("b200", 180, 8000, 900, 8e-6, 2250)  # data sheet
    if run.device != gpu.name:
        gpu = config.get_gpu_config_by_name(run.device.replace("100", "100-sxm"))
    replicas = run.gpus // (run.tensor * run.pipeline)
    shards = run.tensor if run.sequence_parallel else 1
    ranks = config.ParallelismConfig(run.tensor, run.pipeline, replicas, sp_size=shards)
    is_full = "checkpointing" in run.options
    result = analysis.LLMAnalysis(
        model, gpu, config.DtypeConfig(), ranks, flops_efficiency=0.5
    ).training(
        batch_size_per_gpu=run.batch,
        gradient_accumulation_steps=run.passes,
        seq_len=run.tokens,
        activation_recomputation=analysis.ActivationRecomputation(2 if is_full else 0),
        ds_zero=analysis.DSZeRO.STAGE_1,
        flash_attn="megatron" not in run.options,
        mlp_gated_linear_units=run.model_type == "llama",
    )
    tensors = Figure(result["(weight+op_state+grad+act)_memory_per_gpu"] / GIB)
    step = Figure(1000 * result["latency_per_iter"])
    return {STEP: step, **dict.fromkeys([TENSORS, *MEMORY.values()], tensors)}


def kitsune_mib(architecture: str, input_size: int, batch_size: int) -> float:
    """Return the peak memory of a training step with SGD in MiB, by torch-kitsune."""
    from kitsune.predict import predict_memory

    result = predict_memory(
        create_model(architecture, input_size),
        input_shape=(3, input_size, input_size),
        batch_size=batch_size,
        optimizer="sgd",
    )
    return float(result.total_bytes) / MIB


def aiconfigurator(row: Any) -> Figures:
    """Run aiconfigurator for Llama 7B or 65B with TensorRT-LLM, its default."""
    from aiconfigurator.cli.api import cli_estimate

    folder, times = Path(config_folder()) / row.Model.split("/")[1], 2 if "65B" in row.Model else 1
    sizes = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16",
        "hidden_size": 4096 * times, "intermediate_size": 11008 * times, "vocab_size": 32000,
        "num_hidden_layers": 32 if times == 1 else 80, "num_attention_heads": 32 * times,
        "num_key_value_heads": 32 * times, "max_position_embeddings": 4096,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    result = cli_estimate(
        str(folder), "a100_sxm", mode="static", isl=decoding.PROMPT, osl=decoding.TOKENS,
        batch_size=row.Per_Process_Batch_Size,
        gemm_quant_mode="int4_wo" if "gptq" in row.Experiment_Name else None,
    )  # fmt: skip
    return {PROMPT: Figure(result.ttft), TOKEN: Figure(result.tpot)}
