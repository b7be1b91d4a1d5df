"""Step times of NeuSight's whole models in fp32: Hugging Face's modules, traced, eager attention.

Nothing is fitted: the constants are the shipped ones, learned from image models and kernels, on a
fast host. The source empties the allocator before each run, so training steps include cudaMalloc.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from research.priors.llm_foundry import bounds, known_constants
from trappm.extensions.transformers.model_heads import transformer_times
from trappm.learner.interface import Workload
from trappm.learner.physics.step_time import Lookup, terms_of, times_of
from trappm.profiler.devices.catalogue import known_spec
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.records import Graph, Phase, Precision
from trappm.profiler.records.step_scope import StepScope
from trappm.profiler.traced_step import StepKernels
from trappm.profiler.tracing.tracer import Tracer

SIZES = ["hidden", "layers", "heads", "vocab", "ffn"]
POSITIONS = {"gpt": 1024, "opt": 2048, "bert": 512}
"""Number of positions in the published configurations; their sequences are shorter."""


def family_of(model: str) -> str | None:
    """Return the family, or None for Switch, which routes tokens by values."""
    return next((family for family in POSITIONS if model.startswith(family)), None)


def configuration(family: str, length: int, sizes: tuple[int, ...]) -> Any:
    """Return Hugging Face's configuration of a model."""
    import transformers

    hidden, layers, heads, vocabulary, wide = sizes
    positions = max(length, POSITIONS[family])
    if family == "gpt":
        return transformers.GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary,
            n_positions=positions,
        )  # fmt: skip
    common = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": vocabulary, "max_position_embeddings": positions,
    }  # fmt: skip
    wide = wide or 4 * hidden
    if family == "opt":
        return transformers.OPTConfig(**common, ffn_dim=wide)
    return transformers.BertConfig(**common, intermediate_size=wide)


def _loss(output: Any, inputs: Any) -> Tensor:
    name = "prediction_logits" if "prediction_logits" in output else "logits"
    scores = output[name].flatten(0, 1)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device="meta"))


@cache
def _kernels(family: str, length: int, sizes: tuple[int, ...], phase: Phase) -> StepKernels | None:
    import transformers

    kind = transformers.AutoModelForCausalLM
    if family == "bert":
        kind = transformers.AutoModelForSequenceClassification
        if phase is Phase.TRAIN:
            kind = transformers.AutoModelForPreTraining
    config = configuration(family, length, sizes)
    with torch.device("meta"):
        model = kind.from_config(config, attn_implementation="eager")
    tokens = ExampleInputs.of(torch.zeros(2, length, dtype=torch.long))
    tracer = Tracer(model, tokens, phase=phase, batch_sizes=(2, 3), loss=_loss, is_named=True)
    return tracer.trace().kernels


def predicted(sheet: pd.DataFrame) -> pd.DataFrame:
    """Predict the rows of one card without compilation, on cards of the catalogue."""
    rows = []
    sheet = sheet[(sheet.n_gpus <= 1) & sheet.variant.isna() & sheet.hidden.notna()]
    for row in sheet.itertuples(index=False):
        device, family = row.device.lower(), family_of(row.model)
        spec = known_spec(device)
        if family is None or spec is None:
            continue
        phase = Phase.INFER if row.phase == "infer" else Phase.TRAIN
        sizes = tuple(0 if np.isnan(n) else int(n) for n in (getattr(row, s) for s in SIZES))
        workload = Workload(
            graph=Graph.empty(int(row.batch)),
            kernels=_kernels(family, int(row.seq_len), sizes, phase),
            phase=phase,
            scope=StepScope(updates=False, waits_for_host=False),
        )
        card = device.split("-")[0]
        constants, known = known_constants(card), transformer_times(device, Precision.FP32)
        if known is not None:
            constants = known.moved(known_constants(known.like or card), spec)
        times = times_of(terms_of([workload], spec), Lookup(constants), spec)
        rows.append(
            {
                "group": f"neusight {card}, {phase}",
                "model": row.model,
                "what": f"{row.seq_len} x {row.batch} {row.device}",
                "measured": row.e2e_ms,
                "predicted": float(times.device.sum()),
                "low": np.nan,
                "high": np.nan,
            }
        )
    return pd.DataFrame(rows)


def fitted(rows: pd.DataFrame) -> str:
    """Return the bounds of 90 % of the errors of cards whose predictions depend on these rows."""
    known = rows[~rows.group.str.startswith("neusight p100")]
    low, high = bounds((known.measured / known.predicted).tolist(), known.group.tolist())
    return f"fp32: errors=({low:.3f}, {high:.3f})"
