"""Questions about many GPUs, as users ask them: by `predict`, `compare` and `scale`."""

import pytest
from onnx_export import export_onnx

import trappm
from trappm.extensions.parallel.scaling import best, scaling
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


@pytest.mark.extension("onnx")
def test_file_with_fixed_batch_size_is_scaled_at_that_size(tmp_path):
    export_onnx("test_resnet", 64, tmp_path / "fixed.onnx", batch_size=3)
    prediction = predict_parallel(str(tmp_path / "fixed.onnx"), device="a100", gpus=2)
    assert prediction.batch_size == 3


def test_infeasible_device_does_not_affect_others():
    models, counts = ["test_resnet"], [1, 2]
    predictions, refusals = scaling(models, ["a100", "a100x4"], counts, ["ddp"], batch_size=8)
    assert {p.device for p in predictions} == {"a100-40gb"}
    assert any("a100x4" in line for line in refusals)
    with pytest.raises(InputError, match="a100x4"):
        scaling(models, ["a100x4"], counts, ["ddp"], batch_size=8)


def test_best_is_chosen_among_fitting_setups(scaled):
    fitting = [p for p in scaled[0] if p.fits]
    chosen = best(scaled[0])
    assert chosen["fastest"].samples_per_s == max(p.samples_per_s for p in fitting)
    assert chosen["cheapest"].usd_per_million == min(
        p.usd_per_million for p in fitting if p.usd_per_million
    )
    large, _ = scaling(["hf:gpt2"], ["v100"], [1, 2], ["ddp"], batch_size=512, sequence_length=1024)
    assert not any(p.fits for p in large)
    assert best(large) == {}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("scale resnet18 --gpus 2 --strategy tp --device a100", "use ddp or fsdp"),
        ("scale resnet18 --gpus 9 --per-node 9 --device h100", "a node has at most"),
        ("scale resnet18 --gpus 8,x --device a100", "--gpus is '8,x'"),
        ("scale resnet18 --gpus 8 --strategy zero --device a100", "it must be one of ddp"),
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
    assert answer["refused"] == []
    assert all(p["sentence"] for p in answer["predictions"])


def test_tables_fit_a_terminal_and_name_model_and_device(printed):
    shown = printed("scale resnet18 --batch-size 32 --device a100 --gpus 1,2,4")
    question, answer, *_ = shown.splitlines()
    assert question == "resnet18 on A100 40 GB, fp32, batch 32 per GPU."
    assert answer.startswith("Fastest: ")
    shown = printed("scale resnet18 --gpus 1,2 --device a100 --device v100")
    assert shown.startswith("resnet18, fp32, batch 1 per GPU.\nFastest: ")
    rows = [line for line in shown.splitlines() if line.startswith(("device", "a100"))]
    assert max(map(len, rows)) <= 80
    shown = printed("scale resnet18 vgg11 --gpus 1,2 --accumulation 4 --strategy ddp")
    for model in ("resnet18", "vgg11"):
        question = f"{model} on A100 40 GB (default), fp32, batch 1 per GPU, 4 passes.\n"
        assert f"{question}Fastest: " in shown


@pytest.mark.parametrize("passes", [1, 4])
def test_single_gpu_equals_predict(passes):
    options = {"batch_size": 32, "device": "a100", "optimizer": "adam", "accumulation": passes}
    alone = trappm.predict("resnet18", **options)
    shared = predict_parallel("resnet18", gpus=1, **options)
    assert shared.step_time_ms == pytest.approx(alone.step_time_ms, rel=1e-6)
    assert shared.samples_per_s == pytest.approx(alone.samples_per_s, rel=1e-6)
    if passes == 1:
        assert shared.memory_mib == pytest.approx(alone.memory_mib)
    assert shared.speedup == pytest.approx(1.0)
