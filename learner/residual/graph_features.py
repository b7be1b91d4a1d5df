"""Features of a graph for residual models: its operators and its convolutions.

Models of one family have similar errors, and the operators identify a family. Errors of
convolutions depend on the algorithm that cuDNN picks, so the scratch memory of each kind of
algorithm is a feature, too.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT
from trappm.profiler.records import Graph

Array = npt.NDArray[np.float64]

MIB = 2.0**20

OPERATORS = (
    "Conv", "MatMul", "Gemm", "Einsum", "Attention", "LSTM",
    "BatchNormalization", "LayerNormalization", "GroupNormalization",
    "Relu", "Sigmoid", "HardSwish", "HardSigmoid", "Gelu", "Erf", "Tanh", "Softmax", "Clip",
    "Add", "Mul", "Div", "Pow", "ReduceMean", "MaxPool", "AveragePool", "GlobalAveragePool",
    "Transpose", "Concat", "Slice", "Split", "Gather", "Resize",
)  # fmt: skip
"""Operators that distinguish families of models."""

CONVOLUTION_FEATURES = 10

FFT_TILE = 32 * 32
"""cuDNN's tiled transform works on tiles of 32 x 32."""


def operator_shares(graph: Graph) -> list[float]:
    """Return the share of each of `OPERATORS` in the nodes (32)."""
    counts = Counter(graph.operators)
    return [counts[operator] / max(graph.node_count, 1) for operator in OPERATORS]


def convolution_scratch(graph: Graph) -> Array:
    """Return the largest scratch memory of each convolution algorithm as log(1 + MiB) (10).

    For k x k convolutions: spectra of images and filters (Mathieu et al. 2014), filters in tiles,
    Winograd's transforms of 4 x 4 tiles (Lavin and Gray 2016); for these, pointwise and grouped
    ones, copies of input and output in another layout. Then how wide they are, the share whose
    channels are no multiple of 4 (no tensor cores), and how far the images are from square.
    """
    chosen = np.array([operator == "Conv" for operator in graph.operators], dtype=bool)
    if not chosen.any():
        return np.zeros(CONVOLUTION_FEATURES)
    inputs, outputs = (
        np.maximum(s[chosen].astype(np.float64), 1.0)
        for s in (graph.input_shapes, graph.output_shapes)
    )
    batch = float(graph.batch_size)
    channels, filters = inputs[:, 1], outputs[:, 1]
    pixels, results = inputs[:, 2] * inputs[:, 3], outputs[:, 2] * outputs[:, 3]
    made_of = graph.macs[chosen] // (batch * filters * results)
    pointwise = made_of == channels
    dense = ~pointwise & (made_of % channels == 0)
    complexes = 2 * BYTES_PER_ELEMENT / MIB
    spectra = complexes * pixels * (channels * filters + batch * (channels + filters))
    tiles = complexes * FFT_TILE * channels * filters
    transforms = channels * filters + batch * results / 4 * (channels + filters)
    winograd = 16 * BYTES_PER_ELEMENT / MIB * transforms
    copies = BYTES_PER_ELEMENT / MIB * batch * (channels * pixels + filters * results)

    def largest(values: Array, of: npt.NDArray[np.bool_]) -> float:
        return float(np.log1p(values[of].max(initial=0.0)))

    every = np.ones(len(channels), dtype=bool)
    return np.array(
        [
            largest(spectra, dense),
            largest(tiles, dense),
            largest(winograd, dense),
            largest(copies, dense),
            largest(copies, pointwise),
            largest(copies, ~dense & ~pointwise),
            largest(channels, dense),
            largest(filters, dense),
            float(np.mean((channels % 4 != 0) | (filters % 4 != 0))),
            largest(inputs[:, 3] / inputs[:, 2], every),
        ]
    )
