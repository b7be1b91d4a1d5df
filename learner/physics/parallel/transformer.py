"""A transformer by its shape alone: work and memory of its step without a trace.

For what is too large to be traced for each question, or is known by its shape only, as published
runs are. Products are 6 operations a parameter and token (Kaplan et al. 2020); activations are
those of Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trappm.learner.physics.parallel.rank_memory import MemoryNeeds, activation_share
from trappm.learner.physics.parallel.step_work import Gradient, StepWork
from trappm.learner.physics.parallel.strategy import Parallelism
from trappm.profiler.errors import InputError

RECOMPUTED = 4 / 3
"""Work of a step with checkpointed activations: the forward pass once more."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What a training keeps for each parameter, in bytes."""

    parameters: float = 4.0
    gradients: float = 4.0
    states: float = 8.0
    """Of the optimizer; with main copies in fp32 where parameters are in 16 bits."""


FP32_ADAM = StateBytes()
MIXED_ADAM = StateBytes(parameters=2.0, gradients=2.0, states=16.0)
"""Megatron-LM and DeepSpeed in fp16: both moments, and main copies of parameter and gradient."""
BF16_ADAM = StateBytes(parameters=2.0, gradients=6.0, states=12.0)
"""DeepSpeed's BF16 optimizer: gradients are summed in fp32 beside those in bf16."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder of equal blocks, and what a pass of it is run on.

    Raises:
        InputError: a size below 1, or heads that do not divide the width.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    """Tokens of a sample."""
    batch_size: int = 1
    """Samples of a pass on one rank (a micro-batch)."""
    perceptron: int = 0
    """Width within the perceptron; by default four times the hidden one."""
    element_bytes: int = 2
    """Of activations."""
    fused_attention: bool = False
    """Whether no matrix of scores is kept."""
    checkpointing: bool = False
    """Whether only the inputs of blocks are kept."""
    state_bytes: StateBytes = MIXED_ADAM

    def __post_init__(self) -> None:
        names = ("layers", "hidden", "heads", "vocabulary", "sequence", "batch_size")
        wrong = [name for name in names if getattr(self, name) < 1]
        if wrong:
            raise InputError(f"{wrong[0]} of a transformer is {getattr(self, wrong[0])}, below 1")
        if self.hidden % self.heads:
            raise InputError(f"{self.heads} heads do not divide a width of {self.hidden}")

    @property
    def block_parameters(self) -> float:
        """Of a block: four products of attention, two of the perceptron, two norms."""
        wide = self.perceptron or 4 * self.hidden
        return 4 * self.hidden**2 + 2 * self.hidden * wide + 9 * self.hidden + wide

    @property
    def root_parameters(self) -> float:
        """The embedding, which is the last product as well, and the last norm."""
        return (self.vocabulary + 2) * self.hidden

    @property
    def parameters(self) -> float:
        return self.layers * self.block_parameters + self.root_parameters

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch_size

    @property
    def flops(self) -> float:
        """Of a forward and backward pass."""
        attention = 12 * self.layers * self.hidden * self.sequence * self.tokens
        return 6 * self.parameters * self.tokens + attention

    @property
    def boundary_bytes(self) -> float:
        """A block's result."""
        return self.tokens * self.hidden * self.element_bytes

    def activation_bytes(self, tensor_parallel: int = 1) -> float:
        """Of a block, as one rank keeps them for the backward pass."""
        scores = 0.0 if self.fused_attention else 5 * self.heads * self.sequence / self.hidden
        units = 10 + (24 + scores) / tensor_parallel
        return self.tokens * self.hidden * units * self.element_bytes / 2

    def logits_bytes(self, tensor_parallel: int = 1) -> float:
        """Scores of the vocabulary: as computed, in fp32 for the loss, and their gradient."""
        each = self.element_bytes + 4 + 4
        return self.tokens * self.vocabulary * each / tensor_parallel

    def work(self, pass_ms: float, update_ms: float = 0.0) -> StepWork:
        """Its step on one GPU, where a forward and backward pass takes so long.

        With checkpointing the backward pass computes the forward pass once more.
        """
        size = self.state_bytes.gradients
        count = self.layers
        gradients = [
            Gradient(self.block_parameters * size, (place + 1) / (count + 1))
            for place in range(count)
        ]
        forward = 1 / (3 * RECOMPUTED) if self.checkpointing else 1 / 3
        return StepWork(
            forward_ms=pass_ms * forward,
            backward_ms=pass_ms * (1 - forward),
            update_ms=update_ms,
            gradients=(*gradients, Gradient(self.root_parameters * size, 1.0)),
            blocks_bytes=(self.block_parameters * size,) * count,
            root_bytes=self.root_parameters * size,
            boundary_bytes=self.boundary_bytes,
            divisible=1.0,
            gathered_share=self.element_bytes / size,
        )

    def needs(self, parallelism: Parallelism) -> MemoryNeeds:
        """What its step keeps; `rank_memory` says what each rank has of it.

        Activations are given such that a rank's share of them is right: attention's scores and the
        logits are divided by tensor parallelism, which the usual share does not know.
        """
        tensor, stages = parallelism.tensor_parallel, parallelism.pipeline_parallel
        under_way = min(stages, parallelism.accumulation)
        block = self.activation_bytes(tensor)
        kept = self.boundary_bytes if self.checkpointing else block
        at_rest = self.layers / stages * under_way * kept
        # Recomputed activations, and as large gradients of them.
        working = 2 * block if self.checkpointing else block
        # The last stage has the logits, and but one pass under way.
        last = self.layers / stages * kept + working + self.logits_bytes(tensor)
        peak = max(at_rest + working, last) / activation_share(parallelism)
        each = self.state_bytes
        all_gradients = self.parameters * each.gradients
        return MemoryNeeds(
            parameters=self.parameters * each.parameters,
            states=self.parameters * each.states,
            gradients=np.array([all_gradients]),
            activations=np.array([peak]),
            all_gradients=all_gradients,
            blocks=[self.block_parameters * each.parameters] * self.layers,
            root=self.root_parameters * each.parameters,
        )
