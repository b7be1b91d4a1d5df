"""Recurrent layers as cuDNN runs them: products, not an operator for each time step."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from trappm.profiler.traced_step import KernelKind, Pass
from trappm.profiler.tracing.kernel_log import KernelLog, Product

# The time steps of a layer wait for each other, so their products are small; those with the inputs,
# and those of the weights' gradients, are of all time steps at once.

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(kernels: KernelLog, name: str, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the results of `torch.lstm`, `gru` and `rnn_*`: output and last states.

    `arguments` are theirs, also those of packed sequences, whose time steps have their mean rows.
    """
    if isinstance(arguments[4], bool):  # packed
        outputs, batch_sizes, state, weights, _, layers, dropout, training, both_ways = arguments
        steps = len(batch_sizes)
    else:
        outputs, state, weights, _, layers, dropout, training, both_ways, batch_first = arguments
        steps = outputs.shape[1 if batch_first else 0]
    states = (state,) if isinstance(state, Tensor) else tuple(state)
    directions = 2 if both_ways else 1
    per_direction = len(weights) // (layers * directions)
    for layer in range(layers):
        own = weights[layer * directions * per_direction :][: directions * per_direction]
        outputs = cast(
            Tensor,
            _Layer.apply(kernels, GATES[name], directions, steps, outputs, *own),  # type: ignore[no-untyped-call]
        )
        if dropout and training and layer + 1 < layers:
            outputs = torch.native_dropout(outputs, dropout, True)[0]
    return outputs, *(torch.empty_like(s) for s in states)


class _Layer(torch.autograd.Function):
    """All directions of one layer; a direction has at least two weights, of inputs and state."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: KernelLog,
        gates: int,
        directions: int,
        steps: int,
        inputs: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        per_direction = len(weights) // directions
        width = weights[1].shape[1]
        outputs = inputs.new_empty(*inputs.shape[:-1], directions * width)
        ctx.kernels, ctx.steps = kernels, steps
        ctx.per_direction = per_direction
        reserved = None
        if not torch.is_inference_mode_enabled():
            # cuDNN's reserve space: the gates and the state of each time step.
            reserved = inputs.new_empty(*inputs.shape[:-1], directions * (gates + 1) * width)
            ctx.save_for_backward(inputs, outputs, reserved, *weights)
        rows = inputs.shape[:-1].numel()
        gate_values = inputs.new_empty(rows, gates * width)
        one_step = inputs.new_empty(rows // steps, gates * width)
        for at in range(0, len(weights), per_direction):
            of_input, of_state = weights[at], weights[at + 1]
            product = Product(rows, gates * width, of_input.shape[1])
            kernels.add(KernelKind.LINEAR, Pass.FORWARD, [inputs, of_input], [gate_values], product)
            product = Product(rows // steps, gates * width, width)
            read = [one_step[:, :width], of_state]
            kernels.add(KernelKind.LINEAR, Pass.FORWARD, read, [one_step], product, ctx.steps)
            written = [one_step[:, :width]]
            kernels.add(KernelKind.ELEMENTWISE, Pass.FORWARD, [one_step], written, count=steps)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs, _, *weights = ctx.saved_tensors
        kernels, steps = ctx.kernels, ctx.steps
        rows = inputs.shape[:-1].numel()
        columns = weights[0].shape[0]
        width = weights[1].shape[1]
        of_gates = inputs.new_empty(rows, columns)
        one_step = inputs.new_empty(rows // steps, columns)
        data, weight = Pass.DATA_GRADIENT, Pass.WEIGHT_GRADIENT
        for at in range(0, len(weights), ctx.per_direction):
            of_input, of_state = weights[at], weights[at + 1]
            written = [one_step[:, :width]]
            kernels.add(KernelKind.ELEMENTWISE, data, written, [one_step], count=steps)
            product = Product(rows // steps, width, columns)
            kernels.add(KernelKind.LINEAR, data, [one_step, of_state], written, product, steps)
            if ctx.needs_input_grad[4]:
                product = Product(rows, of_input.shape[1], columns)
                kernels.add(KernelKind.LINEAR, data, [of_gates, of_input], [inputs], product)
            for read, matrix in ((inputs, of_input), (outputs, of_state)):
                product = Product(columns, matrix.shape[1], rows)
                kernels.add(KernelKind.LINEAR, weight, [of_gates, read], [matrix], product)
        del of_gates, one_step
        of_inputs = torch.empty_like(inputs) if ctx.needs_input_grad[4] else None
        return (None, None, None, None, of_inputs, *(torch.empty_like(w) for w in weights))
