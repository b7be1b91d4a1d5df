"""Memory of litgpt's fine-tuning and inference on one GPU: a traced step, replayed; not fitted.

The sheet has the peak of live tensors (`torch.cuda.max_memory_allocated`) in units of 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.learner.language.decoder import Decoder, Method, Shape, parameter_count
from benchmarks.learner.language.rows import Judged, Row, number, whole
from benchmarks.learner.language.shapes import SHAPES, shape_named
from trappm.profiler.devices.capacity import memory_mib
from trappm.profiler.devices.catalogue import CONTEXT_MIB
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.records import Optimizer, Phase
from trappm.profiler.simulation.memory_simulation import simulate_memory
from trappm.profiler.simulation.training_loop import TrainingLoop
from trappm.profiler.tracing.tracer import Tracer

GB_PER_MIB = 2**20 / 1e9
LORA_EVERYWHERE = {"gemma-2b", "tiny-llama", "phi-2", "Phi-3-mini-4k-instruct", "phi-3"}
"""Whose files under config_hub have LoRA on every layer; others on queries and values."""
RANKS = {"A100": 8, "A10G": 32}
"""Of litgpt's defaults and of the files under config_hub."""
GEMMA_2_LINE = 24
"""From this line on, the source's rows of gemma-2b are those of Gemma 2."""
PROMPT = 64
"""Tokens; inference's memory hardly hangs on them."""
WEIGHT_BYTES = {"bnb.nf4": 0.5 + 4 / 64, "bnb.nf4-dq": 0.5 + 1 / 64 + 4 / 64 / 256}
"""4 bits, and a scale for each 64 weights in 32 bits, or in 8 bits and a scale of 256 scales
(Dettmers et al. 2023)."""
A10G_MIB = 23028
"""NVIDIA's data sheet: 24 GB less what error correction takes."""


def shape_of(row: Row) -> Shape | None:
    if row["model"] == "gemma-2b" and whole(row, "source_line") >= GEMMA_2_LINE:
        return SHAPES["gemma22b"]
    return shape_named(row["model"])


def method_of(row: Row) -> Method:
    """What a row's run trains."""
    name = row["method"]
    quantised = row["quantization"] or ("bnb.nf4" if name == "qlora" else "")
    weight_bytes = WEIGHT_BYTES.get(quantised, 0.0)
    if name.startswith("inference"):
        return Method(inference=True, weight_bytes=weight_bytes)
    if name == "full":
        return Method(wide_scores=True)
    lora = name in ("lora", "qlora")
    return Method(
        rank=RANKS.get(row["device"][:4], RANKS["A100"]) if lora else 0,
        everywhere=lora and row["model"] in LORA_EVERYWHERE,
        adapter={"adapter": 1, "adapter_v2": 2}.get(name, 0),
        chunk=128,
        wide_scores=True,
        weight_bytes=weight_bytes,
    )


def trained_parameters(shape: Shape, method: Method) -> int:
    with torch.device("meta"):
        decoder = Decoder(shape, method, 1)
    return sum(p.numel() for p in decoder.parameters() if p.requires_grad)


def peaks_gb(shape: Shape, method: Method, length: int, batch: int) -> tuple[float, float]:
    """Of live tensors, and of what the allocator takes from the device for them."""
    with torch.device("meta"):
        decoder = Decoder(shape, method, length).bfloat16()
        tokens = torch.zeros(2, length, dtype=torch.long)
    phase = Phase.INFER if method.inference else Phase.TRAIN
    trace, _ = Tracer(decoder, ExampleInputs.of(tokens), None, (2, 3)).phase(phase)
    loop = TrainingLoop()
    if not method.inference:
        loop = TrainingLoop(optimizer=Optimizer.ADAMW, weight_decay=True, accumulation_steps=2)
    memory = simulate_memory(trace, batch, loop)
    return memory.live_mib * GB_PER_MIB, memory.reserved_mib * GB_PER_MIB


STATE_BYTES = 8
"""Of a parameter in 16 bits with its gradient and AdamW's two moments."""


def group_of(row: Row, shape: Shape) -> str:
    name = row["method"]
    if name.startswith("inference"):
        return "litgpt, inference"
    if name == "full":
        least_gb = STATE_BYTES * parameter_count(shape) / 1e9
        # Their files say AdamW, 16 bits and one device.
        below = row["mem_gb"] and float(row["mem_gb"]) < least_gb
        return "litgpt, less than its states" if below else "litgpt, all weights"
    if row["quantization"] or name == "qlora":
        return "litgpt, weights in 4 bits"
    return "litgpt, LoRA and adapters"


def judged(rows: Sequence[Row]) -> Iterator[Judged]:
    """Rows of one GPU, or of several that each run the same; those of FSDP are left out."""
    for row in rows:
        shape = shape_of(row)
        sharded = whole(row, "n_gpus", 1) > 1 and (
            row["device"] != "A10G" or row["method"] == "full"
        )
        if shape is None or sharded or row["status"] not in ("ok", "oom"):
            continue
        method = method_of(row)
        length = whole(row, "longest_example_tokens") or whole(row, "seq_len") or PROMPT
        live, reserved = peaks_gb(shape, method, length, whole(row, "micro_batch", 1))
        card = A10G_MIB if row["device"] == "A10G" else memory_mib("a100")
        assert card is not None
        phase = Phase.INFER if method.inference else Phase.TRAIN
        context = CONTEXT_MIB[phase] * GB_PER_MIB
        yield Judged(
            group=group_of(row, shape),
            model=row["model"],
            what=f"{row['method']} {row['quantization']} {row['micro_batch']} {row['device'][:4]}",
            measured=number(row, "mem_gb"),
            predicted=live,
            fullest=reserved + context,
            capacity=card * GB_PER_MIB,
        )
