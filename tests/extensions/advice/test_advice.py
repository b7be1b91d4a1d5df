"""Changes that make a step fit, and their plans of checkpoints against the tracer."""

import itertools
import json
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn
from torch.utils.data import DataLoader

import trappm
from trappm.extensions.advice import guard
from trappm.extensions.advice.changes import adapter_changes, precision_changes, training_loop
from trappm.extensions.advice.checkpoints import blocks_of, checkpointed
from trappm.extensions.advice.report import print_advice
from trappm.prediction.answer import answer_by_simulation
from trappm.prediction.fit import Verdict
from trappm.prediction.models import subject_of
from trappm.prediction.question import Question
from trappm.profiler.records import Precision

MODEL, BATCH, DEVICE = "test_vit", 8192, "t4"


@pytest.fixture(scope="module", autouse=True)
def home(module_home):
    """One data folder, so that what was traced is traced once."""


@pytest.fixture(scope="module")
def advice():
    """Advice about a step that is too large for its card."""
    return trappm.advise(MODEL, batch_size=BATCH, device=DEVICE, precision="fp32", optimizer="adam")


def run(lines, model):
    """Run the advised lines on a model."""
    exec("\n".join(lines), {"model": model})  # noqa: S102
    return model


def traced_again(model, step, advice):
    """Predict a module at the batch of a changed step."""
    before = advice.before
    return trappm.predict(
        model,
        example_input=torch.empty(8, 3, 160, 160),
        targets=torch.zeros(8, dtype=torch.long),
        device=before.device,
        batch_size=step.batch_size,
        precision=before.precision,
        memory_format=before.memory_format,
        optimizer=before.optimizer,
        accumulation=step.accumulation,
    )


def test_changes_fit_and_are_ordered_by_their_time(advice):
    assert advice.before.verdict is not Verdict.FITS
    assert advice.is_needed
    assert advice.is_reached
    assert all(step.fits for step in advice.changes)
    for hardware, steps in itertools.groupby(advice.changes, lambda s: s.is_other_hardware):
        times = [step.slower for step in steps]
        assert times == sorted(times), hardware
    same = [step for step in advice.changes if step.is_same_training and step.gpus == 1]
    assert {step.batch_size * step.accumulation for step in same} == {BATCH}
    for step in same:
        low, high = step.intervals["step_time_ms"]
        assert low <= step.step_time_ms <= high
    assert advice.cheapest is advice.changes[0]


def test_the_advice_is_printed_with_lines_of_python(advice, capsys):
    print_advice(advice, explain=True)
    assert "from torch.utils.checkpoint import checkpoint" in capsys.readouterr().out


def test_checkpointed_blocks_take_the_predicted_memory_when_traced_again(advice):
    (step,) = [step for step in advice.changes if step.blocks]
    model = run(step.python, timm.create_model(MODEL))
    again = traced_again(model, step, advice)
    assert step.memory_mib == pytest.approx(again.memory_mib, rel=0.02)
    assert step.memory_mib < 0.95 * advice.before.memory_mib


def test_the_advised_lines_change_no_gradient(advice):
    (step,) = [step for step in advice.changes if step.blocks]
    images = torch.randn(2, 3, 160, 160)
    gradients = []
    for lines in ((), step.python):
        torch.manual_seed(0)
        model = run(lines, timm.create_model(MODEL))
        model(images).square().sum().backward()
        gradients.append(model.patch_embed.proj.weight.grad)
    torch.testing.assert_close(*gradients)


def test_a_plan_has_no_more_blocks_than_needed(advice):
    (step,) = [step for step in advice.changes if step.blocks]
    model = timm.create_model(MODEL)
    blocks = blocks_of(model)
    assert list(step.blocks) == blocks[: len(step.blocks)] != blocks
    assert not traced_again(checkpointed(model, step.blocks[:-1]), step, advice).fits


def test_8_bit_moments_are_advised_where_states_are_too_large():
    """Of a layer whose moments are most of the memory; only labels in 32 bits exist."""
    with torch.device("meta"):
        layer = nn.Linear(28_000, 28_000)
    advice = trappm.advise(
        layer, example_input=torch.zeros(16, 28_000), device="t4", precision="fp32",
        optimizer="adamw",
    )  # fmt: skip
    (step,) = [step for step in advice.changes if step.change == "adamw-8bit"]
    assert not step.is_same_training
    assert step.python[-1] == "optimizer = AdamW8bit(model.parameters(), lr=lr)"
    alone = trappm.predict(
        layer, example_input=torch.zeros(16, 28_000), device="t4", precision="fp32",
        optimizer="adamw-8bit",
    )  # fmt: skip
    assert (step.memory_mib, step.step_time_ms) == pytest.approx(
        (alone.memory_mib, alone.step_time_ms)
    )
    # At least the states: six bytes per parameter less.
    saved_mib = advice.before.memory_mib - step.memory_mib
    assert saved_mib > 5.9 * 28_000**2 / 2**20


def test_batch_norms_see_other_batches_in_several_passes(advice):
    assert not advice.has_batch_norm
    assert any(step.accumulation > 1 and step.is_same_training for step in advice.changes)
    other = trappm.advise("test_resnet", batch_size=16384, device=DEVICE, precision="fp32")
    assert other.has_batch_norm
    divided = [step for step in other.changes if step.accumulation > 1 or step.gpus > 1]
    assert divided
    assert not any(step.is_same_training for step in divided)


def test_the_lines_of_bf16_train_an_image_model_that_had_autocast():
    [change] = precision_changes(SimpleNamespace(precision="amp-fp16"), [Precision.BF16])
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.empty(1, 3, 8, 8))
    names = {
        "torch": torch,
        "model": model,
        "DataLoader": DataLoader,
        "dataset": [(torch.randn(3, 8, 8), 1)] * 4,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_of": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    }
    exec("\n".join((*change.python, *training_loop("bf16", 2, 2))), names)  # noqa: S102
    assert names["loss"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("hf:gpt2-tiny", "GPT2LMHeadModel"),
        ("hf:bert-tiny", "BertForMaskedLM"),
        ("hf:vit-tiny", "ViTForImageClassification"),
    ],
)
def test_qlora_loads_the_class_of_the_model(model, name):
    lora, qlora = adapter_changes(model)
    assert f"model = transformers.{name}.from_pretrained(" in qlora.python
    assert (lora.model, qlora.model) == (f"{model},lora=16", f"{model},qlora=16")
    # peft knows no layers of ViT.
    assert ('target_modules="all-linear"' in lora.python[-1]) == (model == "hf:vit-tiny")
    assert not adapter_changes(lora.model)


class Net(nn.Module):
    """Layers that repeat, which a library does not have."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(64, 512)
        layers = [
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.LayerNorm(512))
            for _ in range(6)
        ]
        self.layers = nn.ModuleList(layers)
        self.end = nn.Linear(512, 10)

    def forward(self, x):
        x = self.start(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.end(x)


def test_a_module_of_the_caller_stays_as_it_is():
    net = Net()
    inputs = {"example_input": torch.empty(8, 64), "targets": torch.zeros(8, dtype=torch.long)}
    advice = trappm.advise(net, batch_size=200_000, device="t4", optimizer="sgd", **inputs)
    (step,) = [step for step in advice.changes if step.blocks]
    assert set(step.blocks) <= {f"layers.{number}" for number in range(6)}
    assert "forward" not in vars(net.layers[0])
    question = {"batch_size": step.batch_size, "accumulation": step.accumulation}
    again = trappm.predict(
        run(step.python, net), device="t4", optimizer="sgd", **question, **inputs,
        precision=advice.before.precision, memory_format=advice.before.memory_format,
    )  # fmt: skip
    assert step.memory_mib == pytest.approx(again.memory_mib, rel=0.02)


def test_blocks_are_the_innermost_repeated_layers():
    with torch.device("meta"):
        blocks = blocks_of(timm.create_model("efficientnet_b0"))
    assert blocks[:2] == ["blocks.0", "blocks.1.0"]


def test_a_run_that_is_too_slow_gets_faster(as_json):
    words = "test_vit --batch-size 64 --device a100 --precision fp32 --epochs 100 --samples 1000000"
    hours = as_json(f"predict {words}")["run"]["high_hours"]
    limit_hours = round(0.95 * hours, 3)
    quick = as_json(f"advise {words} --max-hours {limit_hours}")
    assert quick["is_needed"]
    assert all(step["run"]["high_hours"] <= limit_hours for step in quick["changes"])


def test_changes_no_better_than_the_step_as_it_is_are_left_out():
    run = {"epochs": 100, "samples": 1_000_000, "max_hours": 1e-3}
    advice = trappm.advise("test_vit", batch_size=64, device="v100", precision="fp32", **run)
    assert not advice.is_reached
    assert all(step.slower < -0.01 for step in advice.changes)
    assert "tf32" not in {step.change for step in advice.changes}


def test_wrong_questions_give_one_line(refusal):
    assert "cpu-2t" in refusal("advise test_vit --device cpu-2t")
    assert "epochs" in refusal("advise test_vit --max-hours 3")
    assert "max memory is '38'" in refusal("check test_vit --max-memory 38")


# Limits of memory, time and cost, with an exit status for scripts.


WORDS = "check test_resnet --batch-size 64 --device a100"
RUN = "--epochs 10 --samples 1000000"


@pytest.fixture(scope="module")
def step():
    return trappm.predict("test_resnet", batch_size=64, device="a100", epochs=10, samples=1_000_000)


def test_status_says_whether_the_limit_is_beyond_the_interval(step, command):
    low, high = step.intervals["memory_mib"]
    for limit_mib, expected, word in (
        (high + 1, 0, "Holds"), (step.memory_mib, 3, "Not certain"), (low - 1, 1, "Does not hold")
    ):  # fmt: skip
        status, out, err = command(f"{WORDS} --max-memory {limit_mib:.0f}MiB")
        assert (status, err) == (expected, "")
        assert out.startswith(f"{word}: memory is ")
    assert command(WORDS)[0] == 0


def test_the_worst_limit_decides(step, command):
    limits = f"--max-memory 38GiB --max-hours {step.run.low_hours / 2:.4g} --max-cost 1e6"
    status, out, _ = command(f"{WORDS} {RUN} {limits} --json")
    report = json.loads(out)
    assert status == report["exit_status"] == 1
    assert [limit["outcome"] for limit in report["limits"]] == ["holds", "does not hold", "holds"]


def test_a_figure_that_is_not_predicted_is_not_certain(command):
    status, out, _ = command(f"{WORDS} {RUN} --max-cost 5 --device rtx-2060")
    assert status == 3
    assert out.startswith("Not certain: cost is not predicted (no price is known for rtx-2060")


def test_a_run_that_is_not_predicted_has_the_reason(monkeypatch):
    question, subject = Question(epochs=10, samples=1000), subject_of("test_resnet")
    only_memory = answer_by_simulation(question, subject, "a100-40gb", "its graph is unknown")
    monkeypatch.setattr(guard, "predict", lambda *_, **__: only_memory)
    made = trappm.check("test_resnet", epochs=10, samples=1000, max_hours=5)
    assert "time is not predicted (its graph is unknown)" in str(made)


def test_slurm_lines_have_the_upper_bound_of_the_time(step, printed, refusal):
    words = "predict test_resnet --batch-size 64 --device a100 --slurm"
    gres, time = printed(f"{words} {RUN}").splitlines()[1:3]
    assert gres == "#SBATCH --gres=gpu:a100:1"
    days, _, clock = time.removeprefix("#SBATCH --time=").partition("-")
    hours, minutes, _ = map(int, clock.split(":"))
    total = 24 * int(days) + hours + minutes / 60
    assert step.run.high_hours <= total <= step.run.high_hours + 1 / 60
    assert "--epochs" in refusal(words)
