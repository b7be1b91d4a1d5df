"""`trappm.estimate`: any module's memory, what fits, and what it is made of."""

from __future__ import annotations

import json
import re

import pytest
import torch
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
        ((Siamese(),), {}, "no tensor among the inputs"),
        ((Siamese(), torch.empty(0, 3, 8, 8), images(2)), {}, "must not be empty"),
        (("resnet10t",), {"optimizer": "lion"}, "sgd, momentum, adam, adamw"),
        (("resnet10t",), {"precision": "fp8"}, "precision is 'fp8'"),
        (("resnet10t",), {"batch_size": 0}, "batch size is 0"),
        ((Siamese(), images(2), images(2)), {"input_size": 8}, "input_size is for models by name"),
    ],
)
def test_bad_input_is_refused_in_a_line(arguments, options, message):
    with pytest.raises(InputError, match=message):
        trappm.estimate(*arguments, **options)


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
    assert out.startswith("A training step of resnet10t at batch 16 fits a100: ")
    assert max(map(len, out.splitlines())) <= 80
    _, tensors = out.split("the largest tensors\n")
    for row in tensors.splitlines()[2:]:  # no name is cut, nor goes on below
        assert re.fullmatch(r" *\d+  \S* +[a-z]\w+ *(resnet\.py:\d+ *)?", row), row
    status, out, _ = run_cli(*command, "--json")
    answer = json.loads(out)
    assert answer["devices"]["a100"]["fits"] is True
    assert answer["devices"]["a100"]["largest_batch"] > 16
    on_card = answer["devices"]["a100"]
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
        parts[options] = json.loads(out)["devices"]["a100"]["parts_mib"]
    plain, fused, often = parts.values()
    assert "optimizer step" in plain
    assert plain["optimizer step"] > fused.get("optimizer step", 0.0)
    assert often["gradients"] > 0.99 * often["optimizer_state"] / 2
    for options in (("--implementation", "quick"), ("--accumulation", "0")):
        status, _, err = run_cli(*command, *options)
        assert status == 2
        assert err.count("\n") == 1
