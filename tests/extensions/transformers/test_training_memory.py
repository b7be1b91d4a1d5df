"""Bytes that fine-tuning takes, against what PyTorch really has on a CPU."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from simulated_steps import simulated, trace_of

from trappm.profiler.memory.breakdown import Part
from trappm.profiler.memory.simulation import TrainingLoop
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import Precision
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import TraceSettings

LENGTH, BATCH = 64, 3
MIB = 1 << 20
WAYS = [
    ("hf:CONFIG,eager", Precision.AMP_BF16),
    ("hf:CONFIG,checkpointing,eager", Precision.FP32),
    ("hf:CONFIG,lora=4,eager", Precision.BF16),
    ("hf:llama-tiny,qlora=4,checkpointing,eager", Precision.BF16),
    ("hf:llama-tiny,frozen=body,eager", Precision.FP32),
]
CONFIG = {
    "model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 2, "vocab_size": 1024,
    "n_positions": 512, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
"""Without dropout, whose mask is of another type on a CPU."""


@pytest.fixture(params=WAYS, ids=str)
def case(request, tmp_path):
    """Return a transformer with its training options, and a precision."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    text, precision = request.param
    return text.replace("CONFIG", str(file)), precision


class Trained:
    """A real model that takes steps."""

    def __init__(self, name, precision):
        source = source_of(name)
        with torch.device("meta" if "qlora" in name else "cpu"):
            self.model = source.create_model(name, LENGTH).train()
        if "qlora" in name:  # of any values
            self.model = self.model.to_empty(device="cpu")
            self.model.get_base_model().tie_weights()
        if precision is Precision.BF16:
            self.model = self.model.to(torch.bfloat16)
        self._autocast = precision is Precision.AMP_BF16
        self._tokens = {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)}
        self._tokens["labels"] = self._tokens["input_ids"]

    def loss(self):
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            return self.model(**self._tokens, use_cache=False).loss

    @property
    def tensors(self):
        return [*self.model.parameters(), *self.model.buffers()]

    @property
    def trained(self):
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def gradient_bytes(self):
        return sum(p.grad.nbytes for p in self.trained if p.grad is not None)

    def kept_bytes(self):
        """Of storages that autograd keeps from the forward pass, except model and inputs."""
        excluded = [*self.tensors, *self._tokens.values()]
        own = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        kept = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self.loss()
        assert loss.requires_grad
        return sum(kept.values())


def estimated(name, precision, loop="adamw"):
    return simulated(
        name, batch_size=BATCH, sequence_length=LENGTH, precision=precision, optimizer=loop
    )


def state_bytes(optimizer):
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in states if value.dim())


def test_parameters_gradients_and_states_are_those_of_a_real_step(case):
    name, precision = case
    real = Trained(name, precision)
    optimizer = torch.optim.AdamW(real.trained)
    real.loss().backward()
    optimizer.step()
    made = estimated(name, precision, TrainingLoop(optimizer="adamw", accumulation_steps=2))
    parts = made.memory_breakdown.parts_mib
    weights = {t.untyped_storage().data_ptr(): t.nbytes for t in real.tensors}
    assert parts[Part.PARAMETERS] * MIB == sum(weights.values())
    assert parts[Part.OPTIMIZER] * MIB == state_bytes(optimizer)
    assert trace_of(made).parameter_bytes.sum() == real.gradient_bytes
    # Where passes accumulate, all are there at the peak, and one of this pass in addition.
    assert parts[Part.GRADIENTS] * MIB >= real.gradient_bytes


def test_saved_activations_equal_those_on_a_cpu(case):
    name, precision = case
    if precision is Precision.AMP_BF16:  # of which a CPU keeps other copies
        precision = Precision.FP32
    real = Trained(name, precision)
    step = trace(name, LENGTH, TraceSettings(precision))
    assert step.saved_bytes.at(BATCH) == pytest.approx(real.kept_bytes(), rel=0.02)
