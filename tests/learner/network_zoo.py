"""Graphs of made-up but plausible networks, with a cost that no head knows the formula of."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from trappm.learner.interface import Workload
from trappm.learner.paper.encoder import train_encoder
from trappm.learner.paper.presets import LAPTOP
from trappm.profiler.records import Graph

torch.set_num_threads(1)

SMALL = replace(
    LAPTOP,
    encoder=replace(LAPTOP.encoder, widths=(16, 8, 8, 8), steps=200, batch_nodes=1024),
    head=replace(LAPTOP.head, widths=(16, 16), hidden=(16, 16), steps=400),
)


class GraphBuilder:
    """Appends nodes of (operator, inputs, output shape per sample, MACs per sample, weights)."""

    def __init__(self, batch_size):
        self.batch_size = batch_size
        self.rows = []
        self.edges = []

    def add(self, operator, inputs, shape, macs=0, parameters=0):
        source = self.rows[inputs[0]][1] if inputs else (3, *shape[1:])
        self.rows.append((operator, shape, source, macs, parameters))
        self.edges += [(i, len(self.rows) - 1) for i in inputs]
        return len(self.rows) - 1

    def build(self):
        def padded(shape):
            return (self.batch_size, *shape) + (0,) * (5 - len(shape))

        operators, shapes, sources, macs, parameters = zip(*self.rows, strict=True)
        outputs = np.array([np.prod(shape) for shape in shapes])
        return Graph(
            operators=operators,
            edges=np.array(self.edges, dtype=np.int64).reshape(-1, 2),
            input_shapes=np.array([padded(source) for source in sources], dtype=np.int64),
            output_shapes=np.array([padded(shape) for shape in shapes], dtype=np.int64),
            macs=self.batch_size * np.array(macs, dtype=np.int64),
            parameters=np.array(parameters, dtype=np.int64),
            memory_bytes=4 * (self.batch_size * outputs + np.array(parameters)),
            batch_size=self.batch_size,
        )


def network(kind, width, depth, batch_size, size=16):
    """A plain or residual convolutional network, one with depthwise convolutions, or a mixer."""
    g = GraphBuilder(batch_size)
    pixels = size * size
    x = g.add("Conv", [], (width, size, size), 27 * width * pixels, 27 * width)
    for _ in range(depth):
        before = x
        if kind == "mixer":
            x = g.add("LayerNormalization", [x], (width, size, size), 0, 2 * width)
            x = g.add("MatMul", [x], (4 * width, size, size), 4 * width**2 * pixels, 4 * width**2)
            x = g.add("Gelu", [x], (4 * width, size, size))
            x = g.add("MatMul", [x], (width, size, size), 4 * width**2 * pixels, 4 * width**2)
        elif kind == "depthwise":
            x = g.add("Conv", [x], (width, size, size), 9 * width * pixels, 9 * width)
            x = g.add("BatchNormalization", [x], (width, size, size), 0, 2 * width)
            x = g.add("Conv", [x], (width, size, size), width**2 * pixels, width**2)
            x = g.add("HardSwish", [x], (width, size, size))
        else:
            x = g.add("Conv", [x], (width, size, size), 9 * width**2 * pixels, 9 * width**2)
            x = g.add("BatchNormalization", [x], (width, size, size), 0, 2 * width)
            x = g.add("Relu", [x], (width, size, size))
        if kind != "plain":
            x = g.add("Add", [x, before], (width, size, size))
    x = g.add("GlobalAveragePool", [x], (width,))
    g.add("Gemm", [x], (100,), 100 * width, 100 * width)
    return g.build()


def costs(graphs, speed=1.0, noise_seed=None):
    """Step time, memory and (missing) power: each node waits for arithmetic or for memory."""
    rows = []
    for graph in graphs:
        slow = np.isin(graph.operators, ("LayerNormalization", "Gelu", "HardSwish"))
        arithmetic = graph.macs / 2e7
        traffic = graph.memory_bytes / 5e6 * np.where(slow, 2.5, 1.0)
        step_time_ms = 0.4 + (np.maximum(arithmetic, traffic) + 0.05).sum()
        memory_mib = 150 + (graph.memory_bytes.sum() + 8 * graph.parameters.sum()) / 2**20
        rows.append((step_time_ms / speed, memory_mib, np.nan))
    values = np.array(rows)
    if noise_seed is not None:
        values *= np.exp(0.02 * np.random.default_rng(noise_seed).standard_normal(values.shape))
    return values


@dataclass
class Zoo:
    graphs: list[Graph]
    names: list[str]
    """The architecture of each graph."""
    encoder: object
    embeddings: np.ndarray

    def workloads(self, indices):
        """Workloads with embeddings, and their architectures."""
        made = [Workload(graph=self.graphs[i], embedding=self.embeddings[i]) for i in indices]
        return made, [self.names[i] for i in indices]


@pytest.fixture(scope="session")
def small():
    return SMALL


@pytest.fixture(scope="session")
def zoo():
    """96 graphs of 32 architectures, encoded once."""
    graphs, names = [], []
    for kind in ("plain", "residual", "depthwise", "mixer"):
        for width in (8, 16, 24, 40):
            for depth in (2, 5):
                for batch_size in (1, 4, 16):
                    graphs.append(network(kind, width, depth, batch_size))
                    names.append(f"{kind}-{width}-{depth}")
    encoder = train_encoder(graphs, SMALL.encoder, np.random.default_rng(0))
    return Zoo(graphs, names, encoder, encoder.embed(graphs))


@pytest.fixture(scope="session")
def measure():
    return costs


@pytest.fixture(scope="session")
def build_network():
    return network
