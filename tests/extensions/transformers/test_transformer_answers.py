"""Predictions of transformers without labels, based on published steps of some models."""

from dataclasses import replace

import pytest

import trappm
from trappm.extensions.transformers.model_heads import (
    HOST_RANGE,
    OLDER_DISPATCH_US,
    transformer_times,
)
from trappm.learner.physics.step_time import UNPACK_DISPATCHES
from trappm.prediction.question import Question
from trappm.prediction.selection import Selection, load_snapshots
from trappm.profiler.devices.catalogue import process_memory_mib
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision, StepSettings

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))


def test_memory_is_simulated_and_marked_as_such():
    question = {"batch_size": 4, "sequence_length": 64, "optimizer": "sgd"}
    answer = trappm.predict("hf:gpt2-tiny", device="a100", **question)
    process_mib = process_memory_mib("a100", Phase.TRAIN)
    simulated_mib = answer.simulated_memory.reserved_with_workspace_mib + process_mib
    assert answer.memory_mib == pytest.approx(simulated_mib)
    low, high = answer.intervals["memory_mib"]
    assert low < simulated_mib < high


def test_a_step_that_an_a100_ran_fits_it_although_it_would_reserve_more():
    """fms-acceleration ran this step in 72,988 MiB, of which 69,080 were tensors."""
    question = {"sequence_length": 4096, "precision": "bf16", "optimizer": "adamw"}
    name = "hf:mistral-7b,checkpointing"
    answer = trappm.predict(name, device="a100-80gb", batch_size=8, **question)
    assert answer.simulated_memory.live_mib == pytest.approx(69_080, rel=0.01)
    assert answer.fits
    assert answer.largest_batch >= 8
    assert sum(answer.memory_parts_mib.values()) == pytest.approx(answer.memory_mib)


GPT = {"sequence_length": 256, "batch_size": 8, "optimizer": "adamw"}


def test_interval_of_a_gpu_bound_step_equals_held_out_errors():
    """One that waits for the host is less sure, as nobody knows the host."""
    times = transformer_times("h100", Precision.BF16)
    assert times is not None
    widths = {}
    for batch_size in (1, 64):
        question = {**GPT, "batch_size": batch_size, "sequence_length": 1024}
        answer = trappm.predict("hf:gpt2", device="h100", precision="bf16", **question)
        low, high = answer.intervals["step_time_ms"]
        widths[batch_size] = high / low
    stated = times.errors[1] / times.errors[0]
    assert stated <= widths[64] < 1.1 * stated
    assert widths[1] > HOST_RANGE


def test_campaign_labels_take_precedence_over_published_steps():
    shipped = load_snapshots(None)[-1]
    known = shipped.heads["h100"][Phase.TRAIN]
    row = StepSettings(Precision.BF16, MemoryFormat.CONTIGUOUS, Optimizer.ADAM)
    own = replace(
        shipped,
        manifest=shipped.manifest.model_copy(update={"campaign": "mine"}),
        heads={"h100": {Phase.TRAIN: replace(known, settings=(row,))}},
    )
    assert Selection(Question(precision="bf16"), [own]).trained("h100", "hf:gpt2")[1] is None
    assert Selection(Question(precision="amp-bf16"), [own]).trained("h100", "hf:gpt2")[1]
    assert Selection(Question(precision="bf16"), [shipped]).trained("h100", "hf:gpt2")[1]


def test_weights_in_four_bits_keep_the_host_of_short_passes_busy():
    """Each of 7 layers per block is unpacked in the forward pass, and 11 for the backward pass."""
    plain, packed = (
        trappm.predict(
            f"hf:llama-tiny,{method}=4", device="a100", sequence_length=16, precision="bf16"
        ).step_time_ms
        for method in ("lora", "qlora")
    )
    unpackings = 2 * 7 + 11
    assert packed - plain > unpackings * UNPACK_DISPATCHES * OLDER_DISPATCH_US / 1e3
