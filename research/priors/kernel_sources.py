"""Published kernels of several cards as evidence for fits.

neusight        single kernels in fp32, without TF32; times include the launch by a host
aiconfigurator  products in bf16, replayed without a host, so that launches take 2 to 5 us
sailor          large products of Megatron's layers in fp16
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from research.priors.joint_fit import Evidence
from research.priors.kernel_calls import DataType, KernelCall, Operator, kernel_evidence
from research.snapshot.shipped_sheets import neusight_kernels
from trappm.profiler.devices.catalogue import read_name, spec_of
from trappm.profiler.records import MemoryFormat, Precision

NEUSIGHT_SHARES = {
    "a100-pcie-40gb": 0.5,
    "a100-pcie-80gb": 0.5,
    "p100-pcie-16gb": 0.5,
    "v100-pcie-32gb": 1.0,
    "t4": 1.0,
    "h100-sxm-80gb": 1.0,
}
"""Share of the drawn kernels of each card."""
PRODUCTS_FILE = "new/aiconfigurator_gemm_a100_h100_h200.csv.gz"
ATTENTION_FILE = "new/aiconfigurator_attention_a100_h100_h200.csv.gz"
MODEL_KERNELS = 200
"""Number of drawn kernels of language models."""
MIN_LANGUAGE_DIMENSION = 2048
"""Least rows, columns and depth of a product of a language model, a round number."""
PRODUCT_CARDS = ("a100-sxm4-80gb", "h100-sxm5-80gb")
PRODUCT_COUNT = 100
"""Number of drawn products of each card and use."""
HEIGHTS = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56)
"""Heights of square images that the rows of a product may be pixels of."""
MIN_HEIGHT, MIN_PIXELS, MAX_CHANNELS = 7, 1024, 4096
"""Sizes of convolutions of one pixel, rounded from those of timm's networks."""
SAILOR = "sailor"
SAILOR_FILE = "new/sailor_operators_six_gpus.csv.gz"
"""Forward and backward times of Megatron's operators (eth-easl/sailor, MIT)."""
SAILOR_CARDS = {"v100-sxm2-16gb": "V100-16", "rtx-3090": "RTX-3090", "titan-rtx": "Titan-RTX"}
"""Name in the sheet by card. Its RTX 2080 is faster than the peak of that card."""
SAILOR_TYPES = {"fp16": Precision.AMP_FP16, "fp32": Precision.TF32}
"""Precision by the name of the sheet's folder. Cards with TF32 reach its peak in the sheet's fp32,
which is that of TF32 on an A100."""
SAILOR_LENGTH = 2048
"""Tokens per sequence, by the sizes of the sheet's activations."""
SAILOR_WIDTHS = {"OPT-350": 1024, "GPT-Neo-2.7": 2560, "OPT-30": 7168}
SAILOR_LAYERS = {"enc-MLP-GEMM-1": (1, 4), "enc-MLP-GEMM-2": (4, 1)}
"""Inputs and outputs of a layer in multiples of the model's width. The second layer of several
ranks is left out, as its time includes their communication."""
MIN_SAILOR_US = 300.0
"""Shortest time that is used: shorter products wait for their host."""


def megatron_products(data: Path, card: str) -> Evidence:
    """Return forward products of Megatron's layers on a card of `SAILOR_CARDS`.

    They are in fp16 and, on cards with TF32, in TF32.
    """
    sheet, spec, model = pd.read_csv(data / SAILOR_FILE), spec_of(card), read_name(card).model
    is_alone = (sheet.op_name == "enc-MLP-GEMM-1") | (sheet.tensor_parallel == 1)
    sheet = sheet[
        (sheet.card == SAILOR_CARDS[card])
        & sheet.op_name.isin(SAILOR_LAYERS)
        & is_alone
        & (sheet["forward-compute"] > MIN_SAILOR_US)
    ]
    sheet = sheet.assign(precision=sheet.folder.str[-4:].map(SAILOR_TYPES))
    if spec.tf32_tflops is None:
        sheet = sheet[sheet.precision != Precision.TF32]
    keys = ["precision", "model", "micro_batch", "tensor_parallel", "op_name"]
    times_us = sheet.groupby(keys, as_index=False)["forward-compute"].median()
    calls, precisions = [], []
    for precision, name, batch, ranks, layer, time_us in times_us.itertuples(index=False):
        inputs, outputs = (SAILOR_WIDTHS[name] * factor for factor in SAILOR_LAYERS[layer])
        call = KernelCall.of(
            Operator.LINEAR,
            DataType.FP32 if precision == Precision.TF32 else DataType.FP16,
            batch=batch,
            rows=SAILOR_LENGTH,
            inputs=inputs,
            outputs=outputs // ranks,
        )
        calls.append((call, time_us / 1000))
        precisions.append(Precision(precision))
    evidence = kernel_evidence(model, f"{SAILOR} {model}", spec, calls)
    workloads = [
        replace(workload, precision=precision)
        for workload, precision in zip(evidence.workloads, precisions, strict=True)
    ]
    return replace(evidence, workloads=workloads)


def published_kernels(nodes: Path, card: str) -> Evidence:
    """Return NeuSight's kernels of one card, the share of `NEUSIGHT_SHARES`."""
    file = "v100_a100" if card[:4] in {"v100", "a100"} else "other_gpus"
    whole = neusight_kernels(nodes / f"neusight_kernels_fp32_{file}.csv.gz", card)
    chosen = np.arange(len(whole.workloads)) % round(1 / NEUSIGHT_SHARES[card]) == 0
    return replace(whole.at(chosen), device=read_name(card).model, host=f"neusight {card}")


def half_products(data: Path, card: str) -> Evidence:
    """Return products in bf16 of one card, drawn at random from aiconfigurator's.

    Half of them count as linear layers. The others have sizes of networks for images and count as
    convolutions of one pixel: in channels-last, these are the same products.
    """
    model = read_name(card).model
    sheet = pd.read_csv(data / PRODUCTS_FILE)
    sheet = sheet[(sheet.system == f"{model}_sxm") & (sheet.gemm_dtype == "bfloat16")]
    heights = [max(h for h in HEIGHTS if rows % h**2 == 0) for rows in sheet.m]
    sheet = sheet.assign(height=heights)
    of_images = sheet[
        (sheet.height >= MIN_HEIGHT)
        & (sheet.m >= MIN_PIXELS)
        & (sheet[["n", "k"]].max(axis=1) <= MAX_CHANNELS)
    ]
    calls = [
        (
            KernelCall.of(Operator.LINEAR, DataType.BF16, batch=1, rows=m, inputs=k, outputs=n),
            time_ms,
        )
        for m, n, k, time_ms, _ in _draw_rows(sheet)
    ]
    calls += [
        (
            KernelCall.of(
                Operator.CONV2D, DataType.BF16, MemoryFormat.CHANNELS_LAST,
                batch=m // h**2, inputs=k, outputs=n, height=h, window=1, stride=1, groups=1,
            ),
            time_ms,
        )
        for m, n, k, time_ms, h in _draw_rows(of_images)
    ]  # fmt: skip
    return kernel_evidence(model, f"aiconfigurator {model}", spec_of(card), calls)


def large_products(data: Path, card: str) -> Evidence:
    """Return products in bf16 as large as those of language models, drawn at random."""
    model = read_name(card).model
    sheet = pd.read_csv(data / PRODUCTS_FILE)
    sheet = sheet[
        (sheet.system == f"{model}_sxm")
        & (sheet.gemm_dtype == "bfloat16")
        & (sheet[["m", "n", "k"]].min(axis=1) >= MIN_LANGUAGE_DIMENSION)
    ].sample(MODEL_KERNELS, random_state=0)
    calls = [
        (
            KernelCall.of(
                Operator.LINEAR, DataType.BF16, batch=1, rows=row.m, inputs=row.k, outputs=row.n
            ),
            row.latency_ms,
        )
        for row in sheet.itertuples()
    ]
    return kernel_evidence(model, f"aiconfigurator {model}", spec_of(card), calls)


def flash_attention(data: Path, card: str) -> Evidence:
    """Return attention in bf16 with 2,048 to 8,192 tokens of one card, drawn at random.

    The sheet's kernels are causal. They have half of the arithmetic of ours, so they count twice.
    """
    model = read_name(card).model
    sheet = pd.read_csv(data / ATTENTION_FILE)
    sheet = sheet[
        sheet.device.str.contains(model.upper())
        & (sheet.op_name == "context_attention")
        & (sheet.window_size.fillna(0) == 0)
        & sheet.isl.between(2048, 8192)
        & sheet.head_dim.isin((64, 128))
    ].sample(MODEL_KERNELS, random_state=0)
    calls = [
        (
            KernelCall.of(
                Operator.ATTENTION, DataType.BF16,
                batch=row.batch_size, heads=row.num_heads, length=row.isl, width=row.head_dim,
            ),
            2 * row.latency_ms,
        )
        for row in sheet.itertuples()
    ]  # fmt: skip
    return kernel_evidence(model, f"aiconfigurator {model}", spec_of(card), calls)


def _draw_rows(sheet: pd.DataFrame) -> Iterator[tuple[int, int, int, float, int]]:
    """Return rows, columns, depth, time in ms and height of products drawn at random."""
    drawn = sheet.sample(PRODUCT_COUNT, random_state=0)
    return drawn[["m", "n", "k", "latency_ms", "height"]].itertuples(index=False)
