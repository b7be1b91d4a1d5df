"""Steps whose blocks are divided over ranks and stages, as Megatron-LM runs them."""

import pytest

from trappm.extensions.parallel.scaling import scaling
from trappm.extensions.parallel.schedules import Parallelism, ShardingStrategy
from trappm.extensions.parallel.shared_step import SharedStep
from trappm.profiler.errors import InputError

pytest.importorskip("transformers")
pytestmark = pytest.mark.extension("transformers")

LONG = {"sequence_length": 1024, "precision": "bf16", "optimizer": "adamw"}


def step_of(model, batch_size, **settings):
    return SharedStep.of(model, "a100", batch_size=batch_size, **{**LONG, **settings})


def on(step, tensor=1, pipeline=1, gpus=None, **sizes):
    gpus = gpus or tensor * pipeline
    layout = {"tensor": tensor, "pipeline": pipeline, "gpus": gpus}
    return step.on(Parallelism(strategy=ShardingStrategy.TP, **layout, **sizes))


@pytest.fixture(scope="module")
def large():
    """A step that computes for much longer than its kernels take to launch."""
    return step_of("hf:pythia-1.4b,megatron", 8)


@pytest.fixture(scope="module")
def small():
    """A step that waits for the host."""
    return step_of("hf:pythia-410m,megatron", 1)


def test_device_bound_steps_are_divided_by_tensor_and_pipeline(large):
    alone = on(large, accumulation=8).step_time_ms
    for tensor in (2, 4):
        assert 0.6 / tensor < on(large, tensor, accumulation=8).step_time_ms / alone < 1.0
    staged = on(large, pipeline=4, accumulation=64).step_time_ms
    assert 0.25 < staged / on(large, accumulation=64).step_time_ms < 0.35


def test_tensor_parallelism_does_not_divide_the_wait_for_the_host(small):
    steps = [on(small, tensor, accumulation=4).step_time_ms for tensor in (1, 2, 4)]
    assert steps == sorted(steps)
    assert steps[0] < 1.5 * steps[2]


def test_bubble_grows_with_stages_and_shrinks_with_micro_batches(large):
    def idle(pipeline, accumulation):
        step = on(large, pipeline=pipeline, accumulation=accumulation)
        return step.step_time_ms * pipeline / accumulation

    assert idle(2, 4) < idle(4, 4) < idle(8, 4)
    assert idle(4, 4) > idle(4, 8) > idle(4, 64)


def test_pipeline_divides_parameters_but_not_activations(large):
    parts = [on(large, pipeline=stages, accumulation=8).memory_parts_mib for stages in (2, 4)]
    # The first stage has the embeddings in addition to its half or quarter of the blocks.
    assert parts[0]["states"] / 2 < parts[1]["states"] < 0.7 * parts[0]["states"]
    assert parts[1]["activations"] <= parts[0]["activations"]
    assert parts[1]["activations"] > 0.75 * parts[0]["activations"]
    once = on(large, pipeline=4).memory_parts_mib  # a single micro-batch is in one stage at a time
    assert once["activations"] < 0.6 * parts[1]["activations"]


def test_sequence_parallelism_divides_hidden_states(large):
    whole = on(large, 4, accumulation=8)
    divided = on(large, 4, accumulation=8, sequence_parallel=True)
    assert divided.compute_ms < 0.98 * whole.compute_ms
    assert divided.communication_ms == pytest.approx(whole.communication_ms, rel=0.05)
    parts = divided.memory_parts_mib
    kept = (1 / 4) / (10 / 34 + 24 / 34 / 4)  # Korthikanti et al. 2022, equations 2 and 4
    assert parts["activations"] == pytest.approx(kept * whole.memory_parts_mib["activations"])
    checkpointed = step_of("hf:pythia-1.4b,checkpointing,megatron", 8)
    shares = [
        on(checkpointed, 4, sequence_parallel=is_sequence).memory_parts_mib["activations"]
        for is_sequence in (False, True)
    ]
    assert shares[1] < 0.5 * shares[0]
    with pytest.raises(InputError, match="use strategy tp"):
        Parallelism(gpus=4, sequence_parallel=True)


def test_sequence_parallelism_is_an_option_of_tp_alone():
    sizes = {**LONG, "batch_size": 4, "accumulation": 4, "sequence_parallel": True}
    made, refused = scaling(["hf:pythia-410m"], ["b200"], [8], **sizes)
    assert {p.strategy: p.sequence_parallel for p in made} == {
        "ddp": False, "fsdp": False, "tp": True,
    }  # fmt: skip
    assert not refused
    with pytest.raises(InputError, match="ddp has no sequence-parallel"):
        scaling(["hf:pythia-410m"], ["b200"], [8], ["ddp"], **sizes)


def test_options_of_a_name_are_in_any_order():
    steps = [
        on(step_of(f"hf:pythia-70m,{options}", 1), 4, accumulation=4)
        for options in ("megatron,checkpointing", "checkpointing,megatron")
    ]
    assert steps[0].step_time_ms == pytest.approx(steps[1].step_time_ms)
    assert steps[0].memory_mib == pytest.approx(steps[1].memory_mib)


def test_code_of_other_libraries_waits_for_its_own_host():
    steps = [
        on(step_of(f"hf:pythia-410m{kernels}", 1), 4, accumulation=8).step_time_ms
        for kernels in ("", ",megatron")
    ]
    assert steps[0] < 0.8 * steps[1]


def test_auto_chooses_the_fastest_layout_that_may_fit():
    sizes = {**LONG, "batch_size": 1}
    chosen, refused = scaling(["hf:pythia-6.9b"], ["a100"], [8], ["auto"], accumulation=8, **sizes)
    assert [p.fits is not False for p in chosen] == [True]
    assert not refused
    layouts = [
        scaling(["hf:pythia-6.9b"], ["a100"], [8], ["tp"], accumulation=8, **layout, **sizes)[0][0]
        for layout in ({"tensor": 8}, {"tensor": 4, "pipeline": 2}, {"tensor": 1, "pipeline": 8})
    ]
    for other in layouts:
        assert not other.fits or chosen[0].samples_per_s >= other.samples_per_s


def test_indivisible_models_give_one_line(small):
    with pytest.raises(InputError, match="16 attention heads cannot be divided over 3"):
        on(small, 3)
    with pytest.raises(InputError, match="24 layers cannot be divided into 32 pipeline stages"):
        on(small, pipeline=32, gpus=8, nodes=4)
    with pytest.raises(InputError, match="identical blocks of linear layers"):
        on(SharedStep.of("resnet18", "a100", batch_size=8), 2)
