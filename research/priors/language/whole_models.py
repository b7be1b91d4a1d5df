"""Milliseconds of NeuSight's whole models in fp32: Hugging Face's modules, traced; eager attention.

Nothing is fitted: constants of each card are those that ship, learned from images and kernels, on a
host that keeps up. The source empties the allocator before each run, so steps that train wait for
cudaMalloc as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from research.priors.language.pretraining import known_constants, spread
from research.priors.language.rows import Judged, Row, whole
from trappm.extensions.transformers.step_times import transformer_times
from trappm.learner.physics.device_specs import known_spec
from trappm.learner.physics.kernel_terms import terms_of
from trappm.learner.physics.kernel_times import Lookup, times_of
from trappm.learner.workload import Workload
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.records import Graph, MemoryFormat, Phase, Precision
from trappm.profiler.records.step_scope import StepScope
from trappm.profiler.simulation.kernel_profile import KernelProfile
from trappm.profiler.tracing.tracer import StepOptions, Tracer

SHORT_BERT, LONG_GPT = 512, 1024
"""Positions of the published configurations, where sequences are shorter."""


def configuration(row: Row) -> Any:
    """Hugging Face's, or None for a model that is not mapped: Switch routes by values."""
    import transformers

    if not row["hidden"]:
        return None
    hidden, layers, heads = (whole(row, name) for name in ("hidden", "layers", "heads"))
    vocabulary, length = whole(row, "vocab"), whole(row, "seq_len")
    wide = whole(row, "ffn") or 4 * hidden
    if row["model"].startswith("gpt"):
        return transformers.GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary,
            n_positions=max(length, LONG_GPT),
        )  # fmt: skip
    common = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": vocabulary,
    }  # fmt: skip
    if row["model"].startswith("opt"):
        most = max(length, 2 * LONG_GPT)
        return transformers.OPTConfig(**common, ffn_dim=wide, max_position_embeddings=most)
    if row["model"].startswith("bert"):
        most = max(length, SHORT_BERT)
        return transformers.BertConfig(
            **common, intermediate_size=wide, max_position_embeddings=most
        )
    return None


def _loss(output: Any, inputs: Any) -> Tensor:
    name = "prediction_logits" if "prediction_logits" in output else "logits"
    scores = output[name].flatten(0, 1)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device="meta"))


_FIELDS = ("model", "seq_len", "hidden", "layers", "heads", "vocab", "ffn")


@cache
def _kernels(fields: tuple[str, ...], phase: Phase) -> KernelProfile | None:
    import transformers

    row = dict(zip(_FIELDS, fields, strict=True))
    config = configuration(row)
    if config is None:
        return None
    kind = transformers.AutoModelForCausalLM
    if row["model"].startswith("bert"):
        kind = transformers.AutoModelForSequenceClassification
        if phase is Phase.TRAIN:
            kind = transformers.AutoModelForPreTraining
    with torch.device("meta"):
        model = kind.from_config(config, attn_implementation="eager")
    tokens = ExampleInputs.of(torch.zeros(2, whole(row, "seq_len"), dtype=torch.long))
    _, table = Tracer(model, tokens, StepOptions(loss=_loss), (2, 3)).phase(phase)
    sizes = [p.numel() for p in model.parameters()]
    return KernelProfile(
        train=table, infer=table, parameter_tensors=len(sizes), parameters=sum(sizes),
        precision=Precision.FP32, memory_format=MemoryFormat.CONTIGUOUS,
    )  # fmt: skip


def judged(rows: Sequence[Row]) -> Iterator[Judged]:
    """Rows of one card without compilation, on cards of the catalogue."""
    for row in rows:
        device = row["device"].lower()
        spec = known_spec(device)
        if whole(row, "n_gpus") > 1 or row["variant"] or spec is None:
            continue
        phase = Phase.INFER if row["phase"] == "infer" else Phase.TRAIN
        profile = _kernels(tuple(row[name] for name in _FIELDS), phase)
        if profile is None:
            continue
        workload = Workload(
            graph=Graph.empty(whole(row, "batch")), kernels=profile, phase=phase,
            scope=StepScope(updates=False, waits_for_host=False),
        )  # fmt: skip
        model = device.split("-")[0]
        constants, known = known_constants(model), transformer_times(device, Precision.FP32)
        if known is not None:
            constants = known.moved(known_constants(known.like or model), spec)
        times = times_of(terms_of([workload], spec), Lookup(constants), spec)
        yield Judged(
            group=f"neusight {model}, {phase}",
            model=row["model"],
            what=f"{row['seq_len']} x {row['batch']} {row['device']}",
            measured=float(row["e2e_ms"]),
            predicted=float(times.device.sum()),
        )


def fitted(rows: Sequence[Judged]) -> str:
    """Between what bounds errors of cards are whose answers rest on these rows."""
    known = [row for row in rows if row.measured and not row.group.startswith("neusight p100")]
    low, high = spread([1 / (1 + row.error) for row in known], [row.group for row in known])
    return f"fp32: errors=({low:.3f}, {high:.3f})"
