"""Questions about many GPUs, as users ask them: by `predict`, `compare` and `scale`."""

import pytest

import trappm
from trappm.extensions.parallel.scaling import scaling
from trappm.extensions.parallel.shared_step import predict_parallel
from trappm.profiler.errors import InputError

pytest.importorskip("transformers")
pytestmark = pytest.mark.extension("transformers")

GPT = {"sequence_length": 64, "optimizer": "adamw"}


@pytest.fixture(scope="module")
def scaled():
    return scaling(["hf:gpt2"], ["a100", "v100"], [1, 8, 16], batch_size=2, **GPT)


def test_infeasible_combinations_are_listed_and_others_predicted(scaled):
    predictions, refusals = scaled
    assert [line for line in refusals if "12 attention heads cannot be divided" in line]
    assert {p.strategy for p in predictions} == {"ddp", "fsdp", "tp"}
    assert {(p.gpus, p.nodes) for p in predictions} == {(1, 1), (8, 1), (8, 2)}


def test_infeasible_device_does_not_affect_others():
    models, counts = ["test_resnet"], [1, 2]
    predictions, refusals = scaling(models, ["a100", "a100x4"], counts, ["ddp"], batch_size=8)
    assert {p.device for p in predictions} == {"a100-40gb"}
    assert any("a100x4" in line for line in refusals)
    with pytest.raises(InputError, match="a100x4"):
        scaling(models, ["a100x4"], counts, ["ddp"], batch_size=8)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("scale resnet18 --gpus 2 --strategy tp --device a100", "use ddp or fsdp"),
        ("scale resnet18 --gpus 9 --per-node 9 --device h100", "a node has at most"),
        ("scale resnet18 --gpus 9 --device h100", "9 GPUs cannot be split evenly over 2 nodes"),
    ],
)
def test_invalid_arguments_give_one_line(refusal, arguments, reason):
    assert reason in refusal(arguments)


def test_json_compares_devices_and_numbers_of_gpus(as_json):
    words = "scale resnet18 vgg11 --gpus 1,4 --strategy ddp --device a100 --device v100"
    answer = as_json(words, "--batch-size", "32", "--optimizer", "adam")
    assert {p["optimizer"] for p in answer["predictions"]} == {"adam"}
    assert len(answer["predictions"]) == 2 * 2 * 2
    assert set(answer["best"]) == {"resnet18", "vgg11"}
    for model, chosen in answer["best"].items():
        own = [p for p in answer["predictions"] if p["model"] == model and p["fits"] is not False]
        assert chosen["fastest"] == max(own, key=lambda p: p["samples_per_s"])
        assert chosen["cheapest"] == min(own, key=lambda p: p["usd_per_million"])


def test_single_gpu_equals_predict():
    passes = 4
    options = {"batch_size": 32, "device": "a100", "optimizer": "adam", "accumulation": passes}
    alone = trappm.predict("resnet18", **options)
    shared = predict_parallel("resnet18", gpus=1, **options)
    assert shared.step_time_ms == pytest.approx(alone.step_time_ms, rel=1e-6)
    assert shared.samples_per_s == pytest.approx(alone.samples_per_s, rel=1e-6)
    assert shared.speedup == pytest.approx(1.0)
