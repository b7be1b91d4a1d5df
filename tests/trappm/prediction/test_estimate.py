"""`trappm.estimate`: any module's memory, what fits, and what it is made of."""

from __future__ import annotations

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
from trappm import cli
from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.simulation.memory_breakdown import Part
from trappm.profiler.static_profile import step_profile


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


@pytest.fixture(scope="module")
def resnet():
    return trappm.estimate("resnet10t", batch_size=16, optimizer="adam", input_size=64)


def test_a_name_has_the_memory_of_its_profile_and_of_the_card(resnet):
    profile = step_profile("resnet10t", 64)
    simulated = profile.memory(16, "adam").reserved_with_workspace_mib
    parts = resnet.breakdown("a100").parts_mib
    assert resnet.memory_mib("a100") > simulated + parts[Part.CONTEXT]
    assert sum(parts.values()) == pytest.approx(resnet.memory_mib("a100"), rel=0.01)
    parameters_mib = sum(profile.trace.parameter_bytes) / 2**20
    assert parts[Part.OPTIMIZER] == pytest.approx(2 * parameters_mib)


def test_the_largest_batch_fits_and_one_more_does_not(resnet):
    largest = resnet.largest_batch("v100")
    assert resnet.fits("v100", largest)
    assert not resnet.fits("v100", largest + 1)
    assert largest < resnet.largest_batch("a100-80gb")


def test_the_peak_names_modules_lines_and_operators(resnet):
    breakdown = resnet.breakdown(batch_size=256)
    assert "pass, in" in breakdown.moment
    assert breakdown.moment.endswith(")")
    assert {"conv1.0", "layer1"} <= {m.name for m in breakdown.modules.walk(2)}
    inside = sum(child.size_mib for child in breakdown.modules.children.values())
    parts = breakdown.parts_mib
    assert inside <= parts[Part.ACTIVATIONS] + parts.get(Part.BACKWARD, 0.0) + 1e-6
    largest = breakdown.largest[0]
    assert largest.origin.line.startswith("timm/")
    assert largest.origin.operator == "convolution"
    sizes = [tensor.size_mib for tensor in breakdown.largest]
    assert sizes == sorted(sizes, reverse=True)


def test_at_a_small_batch_the_optimizer_is_the_peak(resnet):
    breakdown = resnet.breakdown(batch_size=1)
    assert breakdown.moment == "the optimizer's step"
    assert breakdown.parts_mib[Part.OPTIMIZER_STEP] > 0


def test_a_module_of_two_inputs_with_a_loss_of_its_own():
    estimate = trappm.estimate(Siamese(), images(2), images(2), loss=distance)
    assert estimate.batch_size == 2
    small, large = (estimate.breakdown(batch_size=size).parts_mib for size in (256, 512))
    assert large[Part.ACTIVATIONS] == pytest.approx(2 * small[Part.ACTIVATIONS], rel=1e-4)
    assert large[Part.INPUTS] == 2 * small[Part.INPUTS] == 2 * 512 * 192 * 4 / 2**20


def test_the_module_stays_as_it_is():
    module = Siamese().eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trappm.estimate(module, images(2), right=images(2), loss=distance)
    assert not module.training
    assert all(p.grad is None and not p.is_meta for p in module.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_inference_keeps_no_activations_and_half_precision_fewer_bytes():
    plain = trappm.estimate("resnet10t", batch_size=64, input_size=64)
    infer = trappm.estimate("resnet10t", batch_size=64, input_size=64, phase="infer")
    half = trappm.estimate("resnet10t", batch_size=64, input_size=64, precision="amp-bf16")
    assert infer.memory_mib("a100") < half.memory_mib("a100") < plain.memory_mib("a100")
    assert "forward pass" in infer.breakdown().moment


def test_accumulated_gradients_are_there_throughout():
    loop = trappm.TrainingLoop(accumulation_steps=4)
    once, often = (
        trappm.estimate("resnet10t", batch_size=64, input_size=64, optimizer=optimizer)
        for optimizer in ("sgd", loop)
    )
    assert often.memory_mib("a100") >= once.memory_mib("a100")
    kept, passing = (e.breakdown().parts_mib.get(Part.GRADIENTS, 0.0) for e in (often, once))
    parameters_mib = float(often.trace.parameter_bytes.sum()) / 2**20
    assert kept >= parameters_mib > passing


class PerSample(Siamese):
    def forward(self, left):
        return torch.stack([self.net(sample[None]).sum() for sample in left])


def test_a_loop_over_samples_is_known_at_its_own_batch_only():
    estimate = trappm.estimate(PerSample(), images(3), loss=torch.sum)
    assert estimate.memory_mib("a100") > 0
    for ask in (estimate.largest_batch, lambda device: estimate.fits(device, 4)):
        with pytest.raises(InputError, match="batch 3"):
            ask("a100")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("resnet10t", images(2)), {}, "knows its inputs"),
        ((Siamese(),), {}, r"'left'; call trappm.estimate\(model, left, right\), with targets="),
        ((Siamese(), images(2)), {}, r"'right'; call trappm.estimate\(model, left, right\)"),
        ((Siamese(), 1, 2), {}, "no tensor among the inputs"),
        ((Siamese(), *[images(2)] * 2), {"optimiser": "adam"}, "did you mean 'optimizer'"),
        ((Siamese,), {}, "the model is the class Siamese"),
        ((5,), {}, "the model is int"),
        ((), {}, "missing a required argument: 'model'"),
        (("resnet10t",), {"batchsize": 2}, "no argument 'batchsize'; did you mean 'batch_size'"),
        (("resnet10t",), {"targets": torch.zeros(2)}, "knows its inputs"),
        ((Siamese(), torch.empty(0, 3, 8, 8), images(2)), {}, "must not be empty"),
        (("resnet10t",), {"optimizer": "lion"}, "'lion'; known are sgd, momentum, adam, adamw"),
        (("resnet10t",), {"optimizer": torch.optim.RMSprop}, r"RMSprop; .*momentum \(one tensor"),
        (("resnet10t",), {"optimizer": 5}, "optimizer is int"),
        (("resnet10t",), {"precision": "fp8"}, "precision is 'fp8'"),
        (("resnet10t",), {"batch_size": 0}, "batch size is 0"),
        ((Siamese(), images(2), images(2)), {"input_size": 8}, "input_size is for models by name"),
    ],
)
def test_bad_input_is_refused_in_a_line(arguments, options, message):
    with pytest.raises(InputError, match=message) as refusal:
        trappm.estimate(*arguments, **options)
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
    assert names["memory_mib"] > 0
    assert names["estimate"].batch_size == len(names["targets"])
    assert names["estimate"].fits("v100")


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ((LABELS,), {}),
        ((), {"targets": LABELS}),
        ((LABELS,), {"loss": nn.CrossEntropyLoss()}),
        ((LABELS,), {"loss": nn.CrossEntropyLoss(weight=torch.ones(5))}),
        ((LABELS,), {"loss": lambda output, targets: F.cross_entropy(output, targets).mean()}),
        ((), {"loss": nn.CrossEntropyLoss()}),
        ((), {"loss": F.cross_entropy}),
        ((VALUES,), {}),
        ((), {"loss": nn.MSELoss()}),
        ((), {"loss": nn.BCEWithLogitsLoss(), "targets": VALUES}),
    ],
)
def test_targets_follow_the_batch_whoever_names_the_loss(inputs, options):
    estimate = trappm.estimate(classifier(), images(12), *inputs, **options)
    assert estimate.batch_size == 12
    assert estimate.largest_batch("v100") > 1000


def test_targets_are_inputs_of_a_training_step():
    pixels = torch.zeros(4, 64, 64, dtype=torch.long)
    module, inputs = nn.Conv2d(3, 5, 1), torch.empty(4, 3, 64, 64)
    plain, given = (
        trappm.estimate(module, inputs, **options).breakdown().parts_mib[Part.INPUTS]
        for options in ({"loss": nn.CrossEntropyLoss()}, {"targets": pixels})
    )
    assert given - plain == pixels.nbytes / 2**20
    inference = trappm.estimate(module, inputs, pixels, phase="infer")
    assert Part.INPUTS not in inference.breakdown().parts_mib or (
        inference.breakdown().parts_mib[Part.INPUTS] == plain
    )


def test_an_autoencoders_targets_are_its_inputs():
    once, twice = (
        trappm.estimate(nn.Linear(5, 5), VALUES, targets=targets).trace.blocks.max()
        for targets in (VALUES, VALUES.clone())
    )
    assert twice == once + 1


class OwnTargets(nn.Linear):
    """As language models do that give the loss themselves."""

    def forward(self, x, targets=None):
        return F.mse_loss(super().forward(x), targets)


def test_a_module_that_takes_targets_gets_them():
    assert trappm.estimate(OwnTargets(5, 5), VALUES, targets=VALUES).largest_batch("v100") > 1000


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ((), {"loss": nn.TripletMarginLoss()}, r"needs targets; call .*targets=labels"),
        ((), {"loss": lambda output, targets: output.sum()}, r"needs targets; call .*targets="),
        ((LABELS,), {"loss": torch.sum, "targets": LABELS}, "too many positional arguments"),
        ((LABELS,), {"loss": lambda output: output.sum()}, "does not take output and targets"),
        ((), {"loss": "cross-entropy"}, "loss is 'cross-entropy'; give a function"),
        ((), {"loss": nn.CrossEntropyLoss}, "loss is CrossEntropyLoss; give a function"),
        ((torch.rand(12, 1),), {}, r"shape \(12, 1\) are not the classes of an output of shape"),
    ],
)
def test_what_is_missing_of_a_loss_is_named(inputs, options, message):
    with pytest.raises(InputError, match=message):
        trappm.estimate(classifier(), images(12), *inputs, **options)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output: F.cross_entropy(output, LABELS),
        lambda output: F.mse_loss(output, VALUES),
        lambda output: F.binary_cross_entropy_with_logits(output, VALUES),
    ],
)
def test_labels_of_a_closure_fix_the_batch_and_the_reason_is_given(loss):
    estimate = trappm.estimate(classifier(), images(12), loss=loss)
    assert estimate.only_batch == 12
    assert estimate.fits("v100")
    with pytest.raises(InputError, match=r"known at batch 12 only: at batch 8 .*targets=labels"):
        estimate.largest_batch("v100")
    with pytest.raises(InputError, match="known at batch 12 only, not 3"):
        estimate.fits("v100", 3)
    answer = estimate.to_dict()
    assert answer["devices"]["a100-40gb"]["largest_batch"] is None
    assert "targets=labels" in answer["remarks"][0]


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
def test_optimizers_are_names_in_any_case_and_those_of_torch(optimizer, same):
    given, named = (
        trappm.estimate(classifier(), images(12), optimizer=how) for how in (optimizer, same)
    )
    assert given.loop == named.loop
    assert given.memory_mib("a100") == named.memory_mib("a100")


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
def test_compiled_modules_are_answered_as_eager_ones_and_nothing_is_compiled(how, capfd):
    plain = trappm.estimate(InParts("no"), images(12), LABELS)
    module = InParts(how)
    given = torch.compile(module) if how == "whole" else module
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate = trappm.estimate(given, images(12), LABELS)
    assert estimate.name == "InParts"
    assert estimate.memory_mib("a100") == plain.memory_mib("a100")
    names = [m.name for m in estimate.breakdown(batch_size=4096).modules.walk(3)]
    assert names == [m.name for m in plain.breakdown(batch_size=4096).modules.walk(3)]
    assert ("eager" in repr(estimate)) == (how != "function")
    assert "".join(capfd.readouterr()) == ""
    if how == "in part":
        assert type(module.inner).__name__ == "OptimizedModule"


def test_predictions_of_a_compiled_module_say_that_they_are_eager(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    plain, compiled = (
        trappm.predict(m, images(2), device="a100") for m in (module, torch.compile(module))
    )
    assert (compiled.model, compiled.memory_mib) == ("Sequential", plain.memory_mib)
    assert any("eager" in remark for remark in compiled.remarks)
    assert not any("eager" in remark for remark in plain.remarks)


def test_a_file_has_the_estimate_of_its_model(tmp_path, monkeypatch, run_cli):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    file = tmp_path / "m.onnx"
    export_onnx("resnet10t", 64, file)
    estimate = trappm.estimate(file, batch_size=64, optimizer="adam")
    named = trappm.estimate("resnet10t", batch_size=64, input_size=64, optimizer="adam")
    assert estimate.memory_mib("a100") == pytest.approx(named.memory_mib("a100"), rel=0.01)
    assert estimate.largest_batch("v100") == pytest.approx(named.largest_batch("v100"), rel=0.01)
    assert "convolution" in {tensor.origin.operator for tensor in estimate.breakdown().largest}
    status, out, err = run_cli("estimate", str(file), "--device", "v100")
    assert (status, err) == (0, "")
    assert out.startswith("Fits V100 16 GB")
    export_onnx("resnet10t", 64, tmp_path / "fixed.onnx", batch_size=2)
    status, out, err = run_cli("estimate", str(tmp_path / "fixed.onnx"), "--device", "v100")
    assert (status, err) == (0, "")
    assert "at batch 2 " in " ".join(out.split())
    assert "known at batch 2 only" in " ".join(out.split())
    with pytest.raises(InputError, match="one batch size only, 2, not 3"):
        trappm.estimate(str(tmp_path / "fixed.onnx"), batch_size=3)


def test_an_estimate_shows_the_sum_and_needs_no_arguments_for_json(resnet):
    assert f"{resnet.memory_mib('a100'):,.0f} MiB on a100-40gb" in repr(resnet)
    assert list(resnet.to_dict()["devices"]) == ["a100-40gb"]


def test_unknown_cards_and_steps_that_need_values_are_refused(resnet):
    with pytest.raises(InputError, match="unknown device 'b9000'"):
        resnet.fits("b9000")

    class Choosy(Siamese):
        def forward(self, x):
            return self.net(x) if x.sum() > 0 else self.net(-x)

    with pytest.raises(UnsupportedModelError, match="training step"):
        trappm.estimate(Choosy(), images(2))


@pytest.fixture
def run_cli(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        capsys.readouterr()
        status = cli.run(list(arguments))
        return status, *capsys.readouterr()

    return run


def test_the_command_answers_first_and_fits_a_terminal(run_cli):
    command = ("estimate", "resnet10t", "--batch-size", "16", "--input-size", "64")
    status, out, err = run_cli(*command, "--device", "a100", "--device", "v100")
    assert (status, err) == (0, "")
    assert out.startswith("Fits A100 40 GB: ")
    sentences, tables = out.split("\n\n", 1)  # sentences are wrapped on a screen alone
    assert sentences.count("\n") == 1
    assert max(map(len, tables.splitlines())) <= 80
    _, tensors = out.split("the largest tensors\n")
    for row in tensors.splitlines()[2:]:  # no name is cut, nor goes on below
        assert re.fullmatch(r" *\d+  \S* +[a-z]\w+ *(resnet\.py:\d+ *)?", row), row
    status, out, _ = run_cli(*command, "--json")
    answer = json.loads(out)
    on_card = answer["devices"]["a100-40gb"]
    assert on_card["fits"] is True
    assert on_card["largest_batch"] > 16
    assert sum(on_card["parts_mib"].values()) == pytest.approx(on_card["memory_mib"], rel=0.01)
    status, _, err = run_cli("estimate", "resnet10x")
    assert status == 2
    assert err.count("\n") == 1


def test_the_loop_around_the_step_is_the_commands_as_well(run_cli):
    command = ("estimate", "resnet10t", "--input-size", "64", "--optimizer", "adamw", "--json")
    parts = {}
    for options in ((), ("--implementation", "fused"), ("--accumulation", "4")):
        status, out, _ = run_cli(*command, *options)
        assert status == 0
        parts[options] = json.loads(out)["devices"]["a100-40gb"]["parts_mib"]
    plain, fused, often = parts.values()
    assert "optimizer_step" in plain
    assert plain["optimizer_step"] > fused.get("optimizer_step", 0.0)
    assert often["gradients"] > 0.99 * often["optimizer_state"] / 2
    for options in (("--implementation", "quick"), ("--accumulation", "0")):
        status, _, err = run_cli(*command, *options)
        assert status == 2
        assert err.count("\n") == 1


def test_a_third_state_of_adamw_is_refused():
    module = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(module.parameters(), amsgrad=True)
    with pytest.raises(InputError, match="amsgrad=True, which keeps a third tensor"):
        trappm.estimate(module, torch.empty(2, 8), optimizer=optimizer)
