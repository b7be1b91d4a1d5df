"""Memory of names, files and any module: what it consists of, losses, targets, training loops."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from onnx_export import export_onnx
from torch import nn

import trappm
from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.simulation.memory_breakdown import Part
from trappm.profiler.static_profile import step_profile


def ask(model, *inputs, **options):
    """Predict a module that is called with these inputs, or a name without inputs."""
    options = {"device": "a100", "precision": "fp32", "optimizer": "sgd"} | options
    return trappm.predict(model, example_input=inputs or None, **options)


def small(**options):
    return ask("resnet10t", **({"batch_size": 64, "input_size": 64} | options))


class Siamese(nn.Module):
    """Two inputs, and a dictionary of results."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))

    def forward(self, left, right):
        return {"distance": (self.net(left) - self.net(right)).pow(2).sum(1)}


def images(count):
    return torch.empty(count, 3, 8, 8)


def distance(output):
    return output["distance"].mean()


def test_predicted_memory_is_that_of_the_step_profile():
    answer = small(batch_size=16, optimizer="adam")
    profile = step_profile("resnet10t", 64)
    parts = answer.memory_breakdown.parts_mib
    simulated = profile.memory(16, "adam").reserved_with_workspace_mib
    assert answer.memory_mib > simulated
    assert sum(parts.values()) == pytest.approx(answer.memory_mib, rel=0.01)
    parameters_mib = sum(profile.trace.parameter_bytes) / 2**20
    assert parts[Part.OPTIMIZER] == pytest.approx(2 * parameters_mib)


def test_the_breakdown_names_modules_lines_and_operators():
    breakdown = small(batch_size=256).memory_breakdown
    assert "pass, in" in breakdown.moment
    assert {"conv1.0", "layer1"} <= {m.name for m in breakdown.modules.walk(2)}
    inside = sum(child.size_mib for child in breakdown.modules.children.values())
    parts = breakdown.parts_mib
    assert inside <= parts[Part.ACTIVATIONS] + parts.get(Part.BACKWARD, 0.0) + 1e-6
    largest = breakdown.largest[0]
    assert largest.origin.line.startswith("timm/")
    assert largest.origin.operator == "convolution"
    sizes = [tensor.size_mib for tensor in breakdown.largest]
    assert sizes == sorted(sizes, reverse=True)


def test_at_a_small_batch_the_optimizer_is_the_peak():
    breakdown = small(batch_size=1, optimizer="adam").memory_breakdown
    assert breakdown.moment == "the optimizer's step"
    assert breakdown.parts_mib[Part.OPTIMIZER_STEP] > 0


def test_modules_with_two_inputs_and_their_own_loss_are_predicted():
    answer = ask(Siamese(), images(2), images(2), loss=distance)
    assert (answer.batch_size, answer.step_time_ms, answer.fits) == (2, None, True)
    assert "only the memory of a module with several inputs" in answer.missing["step_time_ms"]
    one, two = (
        ask(Siamese(), images(2), images(2), loss=distance, batch_size=size).memory_breakdown
        for size in (256, 512)
    )
    activations = [b.parts_mib[Part.ACTIVATIONS] for b in (one, two)]
    assert activations[1] == pytest.approx(2 * activations[0], rel=1e-4)
    assert two.parts_mib[Part.INPUTS] == 2 * 512 * 192 * 4 / 2**20


def test_accumulated_gradients_stay_allocated():
    once, often = small(), small(optimizer=trappm.TrainingLoop(accumulation_steps=4))
    assert often.memory_mib >= once.memory_mib
    assert "Step time is that of a step without gradient accumulation." in often.remarks
    kept, passing = (a.memory_breakdown.parts_mib.get(Part.GRADIENTS, 0.0) for a in (often, once))
    parameters_mib = sum(step_profile("resnet10t", 64).trace.parameter_bytes) / 2**20
    assert kept >= parameters_mib > passing


class PerSample(Siamese):
    def forward(self, left):
        return torch.stack([self.net(sample[None]).sum() for sample in left])


def test_a_loop_over_samples_is_known_at_its_own_batch_only():
    answer = ask(PerSample(), images(3), loss=torch.sum)
    assert answer.memory_mib > 0
    assert answer.largest_batch is None
    assert "known at batch 3 only" in answer.missing["largest_batch"]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("resnet10t", {"example_input": images(2)}, "know their input"),
        ("resnet10t", {"targets": torch.zeros(2)}, "know their input"),
        (Siamese(), {}, "give an example of its input"),
        (Siamese(), {"example_input": images(2)}, r"'right'; give example_input=\(left, right\)"),
        (Siamese(), {"example_input": (1, 2)}, "no tensor among the inputs"),
        (Siamese(), {"example_input": (torch.empty(0, 3, 8, 8), images(2))}, "must not be empty"),
        (Siamese(), {"example_input": images(2), "input_size": 8}, "no input size"),
        (Siamese, {"example_input": images(2)}, "the model is the class Siamese"),
        (5, {}, "the model is a int"),
        (["resnet10t"], {}, r"a list of them to trappm.compare\(\)"),
        ("resnet10t", {"optimizer": "lion"}, "'lion'; known are sgd, momentum, adam, adamw"),
        ("resnet10t", {"optimizer": torch.optim.RMSprop}, r"RMSprop; .*momentum \(one tensor"),
        ("resnet10t", {"optimizer": 5}, "optimizer is int"),
        ("resnet10t", {"optimizer": torch.optim.AdamW(nn.Linear(8, 8).parameters(), amsgrad=True)},
         "amsgrad=True, which keeps a third tensor"),
        (nn.Flatten(), {"example_input": torch.tensor(1.0)}, "must not be empty"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(model, options, message):
    with pytest.raises(InputError, match=message) as refusal:
        trappm.predict(model, **options)
    assert "\n" not in str(refusal.value)


def classifier():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))


LABELS = torch.arange(12) % 5
VALUES = torch.rand(12, 5)


def test_the_example_of_the_readme_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    readme = Path(__file__).parents[3] / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    names = {}
    exec(example, names)  # noqa: S102
    assert names["prediction"].fits
    assert names["step"].batch_size == len(names["targets"])
    assert names["step"].fits


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ((LABELS,), {}),
        ((), {"targets": LABELS}),
        ((LABELS,), {"loss": lambda output, targets: F.cross_entropy(output, targets).mean()}),
        ((), {"loss": nn.CrossEntropyLoss()}),
        ((), {"loss": F.cross_entropy}),
        ((VALUES,), {}),
        ((), {"loss": nn.BCEWithLogitsLoss(), "targets": VALUES}),
    ],
)
def test_targets_scale_with_the_batch(inputs, options):
    answer = ask(classifier(), images(12), *inputs, **options)
    assert answer.batch_size == 12
    assert answer.largest_batch > 1000


def test_targets_count_as_inputs_of_a_training_step():
    pixels = torch.zeros(4, 64, 64, dtype=torch.long)
    module, inputs = nn.Conv2d(3, 5, 1), torch.empty(4, 3, 64, 64)

    def inputs_mib(*more, **options):
        return ask(module, inputs, *more, **options).memory_breakdown.parts_mib.get(Part.INPUTS)

    plain = inputs_mib(loss=nn.CrossEntropyLoss())
    assert inputs_mib(targets=pixels) - plain == pixels.nbytes / 2**20
    assert inputs_mib(pixels, phase="infer") in (None, plain)


class OwnTargets(nn.Linear):
    """As language models do that give the loss themselves."""

    def forward(self, x, targets=None):
        return F.mse_loss(super().forward(x), targets)


def test_modules_that_take_targets_receive_them():
    assert ask(OwnTargets(5, 5), VALUES, targets=VALUES).largest_batch > 1000


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ((), {"loss": nn.TripletMarginLoss()}, "needs targets; .*targets=labels"),
        ((), {"loss": lambda output, targets: output.sum()}, "needs targets; .*targets="),
        ((LABELS,), {"loss": torch.sum, "targets": LABELS}, "too many positional arguments"),
        ((LABELS,), {"loss": lambda output: output.sum()}, "does not take output and targets"),
        ((), {"loss": "cross-entropy"}, "loss is 'cross-entropy'; give a function"),
        ((), {"loss": nn.CrossEntropyLoss}, "loss is CrossEntropyLoss; give a function"),
        ((torch.rand(12, 1),), {}, r"shape \(12, 1\) are not the classes of an output of shape"),
    ],
)
def test_problems_with_the_loss_are_explained(inputs, options, message):
    with pytest.raises(InputError, match=message):
        ask(classifier(), images(12), *inputs, **options)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output: F.cross_entropy(output, LABELS),
        lambda output: F.mse_loss(output, VALUES),
        lambda output: F.binary_cross_entropy_with_logits(output, VALUES),
    ],
)
def test_labels_in_a_closure_fix_the_batch_size(loss):
    answer = ask(classifier(), images(12), loss=loss)
    assert answer.fits
    assert answer.largest_batch is None
    assert re.search("batch 12 only: at batch 8 .*targets=labels", answer.missing["largest_batch"])


def weights():
    return nn.Linear(3, 3).parameters()


@pytest.mark.parametrize(
    ("optimizer", "same"),
    [
        ("AdamW", "adamw"),
        (torch.optim.AdamW, "adamw"),
        (torch.optim.AdamW(weights()), "adamw"),
        (torch.optim.SGD(weights(), lr=0.1), "sgd"),
        (torch.optim.SGD(weights(), lr=0.1, momentum=0.9), "momentum"),
        (
            torch.optim.Adam(weights(), fused=True, weight_decay=0.1),
            trappm.TrainingLoop(optimizer="adam", implementation="fused", weight_decay=True),
        ),
        (
            torch.optim.Adam(weights(), foreach=False),
            trappm.TrainingLoop(optimizer="adam", implementation="plain"),
        ),
    ],
)
def test_optimizers_can_be_names_classes_or_instances(optimizer, same):
    given, named = (ask(classifier(), images(12), LABELS, optimizer=x) for x in (optimizer, same))
    assert given.loop == named.loop
    assert given.memory_mib == named.memory_mib


class InParts(nn.Module):
    """Compiled as a whole, in part, in place, or by a function of its own."""

    def __init__(self, how):
        super().__init__()
        inner = classifier()
        if how == "in place":
            inner.compile()
        self.inner = torch.compile(inner) if how == "in part" else inner
        self.act = torch.compile(torch.relu) if how == "function" else torch.relu
        self.head = nn.Linear(5, 5)

    def forward(self, x):
        return self.head(self.act(self.inner(x)))


@pytest.mark.parametrize("how", ["whole", "in part", "in place", "function"])
def test_compiled_modules_are_predicted_as_eager_ones(how, capfd):
    plain = ask(InParts("no"), images(12), LABELS)
    module = InParts(how)
    given = torch.compile(module) if how == "whole" else module
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = ask(given, images(12), LABELS)
        breakdown = answer.memory_breakdown
    assert answer.model == "InParts"
    assert answer.memory_mib == plain.memory_mib
    assert breakdown.parts_mib == plain.memory_breakdown.parts_mib
    assert any("eager" in remark for remark in answer.remarks) == (how != "function")
    assert "".join(capfd.readouterr()) == ""
    if how == "in part":
        assert type(module.inner).__name__ == "OptimizedModule"


def test_files_have_the_memory_of_their_model(tmp_path):
    export_onnx("resnet10t", 64, tmp_path / "m.onnx")
    answer = ask(tmp_path / "m.onnx", batch_size=64, optimizer="adam")
    named = small(optimizer="adam")
    assert answer.memory_mib == pytest.approx(named.memory_mib, rel=0.01)
    assert answer.largest_batch == pytest.approx(named.largest_batch, rel=0.01)
    operators = {tensor.origin.operator for tensor in answer.memory_breakdown.largest}
    assert "convolution" in operators
    export_onnx("resnet10t", 64, tmp_path / "fixed.onnx", batch_size=2)
    fixed = ask(tmp_path / "fixed.onnx")
    assert (fixed.batch_size, fixed.largest_batch) == (2, None)
    assert "one batch size only, 2" in fixed.missing["largest_batch"]
    assert fixed.memory_breakdown.total_mib == pytest.approx(fixed.memory_mib, rel=0.01)


def test_data_dependent_steps_are_refused():
    class Choosy(Siamese):
        def forward(self, x):
            return self.net(x) if x.sum() > 0 else self.net(-x)

    with pytest.raises(UnsupportedModelError, match="training step"):
        ask(Choosy(), images(2), loss=torch.sum)


def test_scripted_modules_are_refused_with_a_remedy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = nn.Sequential(torch.jit.script(nn.Linear(8, 4)))
    with pytest.raises(UnsupportedModelError, match="which cannot be traced; give the module"):
        ask(scripted, torch.empty(2, 8))


def test_a_batch_norm_needs_two_values_per_channel_in_training():
    pooled = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Flatten())
    one, two = torch.empty(1, 3, 8, 8), torch.empty(2, 3, 8, 8)
    with pytest.raises(InputError, match="batch size of 2 or more"):
        ask(pooled, one)
    assert ask(pooled, two).memory_mib > 0
    assert ask(pooled, one, phase="infer").memory_mib > 0
    larger = nn.Sequential(nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4), nn.Flatten())
    assert ask(larger, one).memory_mib > 0, "four values per channel"


def test_the_printed_breakdown_fits_a_terminal(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = ("predict", "resnet10t", "--batch-size", "16", "--input-size", "64", "--breakdown")
    status, out, err = command(*words)
    assert (status, err) == (0, "")
    assert out.startswith("Fits A100 40 GB (default): ")
    _, tables = out.split("Memory at its peak, in ")
    assert max(map(len, tables.splitlines())) <= 80
    _, tensors = out.split("Largest tensors\n")
    for row in tensors.splitlines()[2:]:  # no name is cut, nor continues below
        assert re.fullmatch(r" *\d+  \S* +[a-z]\w+ *(resnet\.py:\d+ *)?", row), row
    answer = json.loads(command(*words, "--json", "--depth", "2")[1])
    parts = answer["memory_breakdown"]["parts_mib"]
    assert sum(parts.values()) == pytest.approx(answer["memory_mib"], rel=0.01)
    assert "memory_breakdown" not in json.loads(command(*words[:-1], "--json")[1])


def test_options_of_the_training_loop_change_the_breakdown(command):
    words = ("predict", "resnet10t", "--input-size", "64", "--optimizer", "adamw", "--breakdown")
    parts = {}
    for options in ((), ("--implementation", "fused"), ("--accumulation", "4")):
        status, out, _ = command(*words, "--json", *options)
        assert status == 0
        parts[options] = json.loads(out)["memory_breakdown"]["parts_mib"]
    plain, fused, often = parts.values()
    assert plain["optimizer_step"] > fused.get("optimizer_step", 0.0)
    assert often["gradients"] > 0.99 * often["optimizer_state"] / 2
    for options in (
        ("--implementation", "quick"), ("--accumulation", "0"),
        ("--accumulation", "4", "--phase", "infer"),
    ):  # fmt: skip
        status, _, err = command(*words, *options)
        assert status == 2
        assert err.count("\n") == 1
