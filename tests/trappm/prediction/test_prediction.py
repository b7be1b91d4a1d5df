"""`trappm.predict` of names, files and modules, with a small snapshot."""

import json
import lzma
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx_export import export_onnx
from snapshot_samples import (
    graphs,
    hasty_encoder,
    publish,
    shipped_heads,
    snapshot_of,
    trained,
)
from torch import nn

import trappm
from trappm.learner.paper.presets import LAPTOP
from trappm.learner.snapshots.registry import Registry
from trappm.prediction.comparison import comparable
from trappm.prediction.prediction import Prediction
from trappm.profiler.errors import InputError
from trappm.profiler.models import zoo


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """Trained a little, on the graphs of three models: what it predicts is not judged here."""
    preset = replace(
        LAPTOP,
        encoder=replace(LAPTOP.encoder, widths=(8, 8), steps=2),
        head=replace(LAPTOP.head, widths=(8,), hidden=(8,), steps=2, members=2),
    )
    heads = {"cpu-2t": trained(np.full((len(graphs()), 3), 10.0), preset.head)}
    return snapshot_of(
        tmp_path_factory.mktemp("snapshots"), heads, preset=preset,
        encoder=hasty_encoder(preset.encoder), campaign="test", errors={"cpu-2t": {}},
        label_counts={},
    )  # fmt: skip


@pytest.fixture
def ask(snapshot):
    """Predict a step on two cores by this snapshot."""
    return partial(trappm.predict, snapshot=snapshot, device="cpu-2t")


@pytest.mark.extension("onnx")
def test_names_modules_and_files_of_one_model_agree(ask, snapshot, tmp_path):
    image, module = torch.empty(1, 3, 64, 64), zoo.create_model("test_convnext", 64)
    export_onnx("test_convnext", 64, tmp_path / "m.onnx")
    by_name = ask("test_convnext", input_size=64, batch_size=4)
    by_module = ask(module, example_input=image, batch_size=4)
    by_file = ask(tmp_path / "m.onnx", batch_size=4)
    assert tuple(by_module) == pytest.approx(tuple(by_name))
    assert tuple(by_file) == pytest.approx(tuple(by_name), rel=0.02)  # its step is rebuilt
    mixed = [module, "test_convnext", tmp_path / "m.onnx"]
    both = trappm.compare(
        mixed, "cpu-2t", example_input=image, input_size=64, batch_size=4, snapshot=snapshot
    )
    for together, alone in zip(both, (by_module, by_name, by_file), strict=True):
        # Several rows at once are multiplied in another order: the last digit may differ.
        assert tuple(together) == pytest.approx(tuple(alone), rel=1e-9)
        assert together.simulated_memory == alone.simulated_memory
        for metric, interval in alone.intervals.items():
            assert together.intervals[metric] == pytest.approx(interval, rel=1e-9)
    live_mib = [p.simulated_memory.live_mib for p in (by_file, by_name)]
    assert live_mib[0] == pytest.approx(live_mib[1], rel=0.02)
    assert by_file.to_dict()["memory_source"] == "rebuilt"


class Hooked(nn.Module):
    """Has all that a trace could disturb: modes, buffers, hooks, gradients, plain tensors."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
        self.offset = torch.ones(6)
        self.norm.eval()
        self.calls = []
        self.convolution.register_forward_hook(lambda *_: self.calls.append("convolution"))

    def forward(self, x):
        x = self.norm(self.convolution(x)).mean((2, 3)) + self.offset
        return self.head(x + torch.arange(6))


def test_predicting_does_not_change_the_module(ask):
    module = Hooked().train()
    module.norm.eval()
    module(torch.rand(2, 2, 9, 7)).sum().backward()
    module.calls.clear()
    tensors = [*module.parameters(), *module.buffers(), module.offset]
    before = [t.detach().clone() for t in tensors]
    gradients = [p.grad.clone() for p in module.parameters()]
    prediction = ask(module, example_input=torch.rand(5, 2, 9, 7))
    assert (prediction.batch_size, prediction.model) == (5, "Hooked")
    assert prediction.memory_source == "traced", prediction.memory_remark
    after = [*module.parameters(), *module.buffers(), module.offset]
    assert all(a is b for a, b in zip(after, tensors, strict=True))
    assert all(map(torch.equal, after, before))
    assert all(map(torch.equal, (p.grad for p in module.parameters()), gradients))
    assert (module.training, module.norm.training) == (True, False)
    assert len(module.convolution._forward_hooks) == 1
    assert module(torch.rand(2, 2, 9, 7)).shape == (2, 3)


def test_small_steps_reserve_what_an_h100_has_shown():
    file = Path(__file__).parents[3] / "examples" / "data" / "h100" / "sweeps" / "check.jsonl.xz"
    with lzma.open(file, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    errors = []
    for row in rows:
        reserved_mib = row.get("memory_detail_mib", {}).get("peak_reserved", math.inf)
        if reserved_mib < 300:
            asked = row["configuration"]
            answer = trappm.predict(asked.pop("architecture"), device="h100", **asked)
            errors.append(abs(answer.reserved_mib / reserved_mib - 1))
    assert len(errors) == 7
    assert max(errors) < 0.1
    assert sorted(errors)[4] < 0.01


class Choosy(torch.autograd.Function):
    """Its gradient depends on values."""

    @staticmethod
    def forward(_, x):
        return -x

    @staticmethod
    def backward(_, gradient):
        return -gradient if gradient.sum() > 0 else gradient


class Untraceable(nn.Linear):
    """Its graph is known; the backward pass asks for values."""

    def forward(self, x):
        return Choosy.apply(super().forward(x))


def test_untraceable_steps_have_a_reason_and_no_simulated_memory(ask):
    example = torch.empty(2, 8, device="meta")  # so that the step cannot run on values
    prediction = ask(Untraceable(8, 8), example_input=example)
    assert prediction.simulated_memory is None
    assert any("rough estimate" in remark for remark in prediction.remarks)


def test_extrapolations_are_reported_in_one_line(tmp_path):
    sizes = np.array([float(graph.macs.sum()) for graph in graphs()])
    targets = np.stack([sizes / 1e6, 10 + sizes / 1e6, np.full(len(sizes), np.nan)], axis=1)
    snapshot = snapshot_of(tmp_path, {"cpu-2t": trained(targets, LAPTOP.head)})
    question = {"device": "cpu-2t", "input_size": 64, "snapshot": snapshot}
    near, far = (trappm.predict("test_resnet", batch_size=size, **question) for size in (4, 8192))
    assert near.beyond_labels == {}
    assert not any("Extrapolation" in remark for remark in near.remarks)
    end = targets[:, 0].max()
    assert far.beyond_labels["step_time_ms"] == pytest.approx(end)
    (line,) = (remark for remark in far.remarks if "largest measured step time" in remark)
    assert line.startswith(f"Extrapolation: the largest measured step time was {end:.0f} ms, ")
    kept, left_out = comparable([near, far], near_labels=True)
    assert kept == [near]
    assert [row["device"] for row in left_out] == ["cpu-2t"]
    assert comparable([far], near_labels=True) == ([far], [])  # an empty table would help less


def test_what_is_far_beyond_the_labels_on_either_side_is_not_compared():
    def ratio_of(ratio):
        return Prediction(
            model=str(ratio), device="cpu-2t", device_name="cpu-2t", batch_size=1, phase="train",
            precision="fp32", memory_format="contiguous", optimizer="sgd", step_time_ms=50 * ratio,
            beyond_labels={"step_time_ms": 50.0},
        )  # fmt: skip

    ratios = (1 / 21, 1 / 19, 19.0, 21.0)
    kept, left_out = comparable([*map(ratio_of, ratios)], near_labels=True)
    assert [float(p.model) for p in kept] == [*ratios[1:3]]
    assert [float(row["model"]) for row in left_out] == [ratios[0], ratios[3]]


def test_a_new_snapshot_does_not_hide_other_devices(tmp_path, monkeypatch):
    """What was the latest before answers for what the new one has no heads for."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    place = tmp_path / "snapshots"
    one, two, card = map(shipped_heads, ("cpu-1t", "cpu-2t", "rtx3090"))

    def answers_by(*devices):
        return [trappm.predict("test_resnet", batch_size=4, device=d).snapshot for d in devices]

    (default,) = answers_by("cpu-2t")
    first = publish(place, {"cpu-2t": one, "rtx3090": card})
    second = publish(place, {"cpu-1t": two})
    assert answers_by("cpu-1t", "cpu-2t", "v100") == [second, first, default]
    third = publish(place, {"cpu-2t": two})
    assert answers_by("cpu-1t", "cpu-2t", "rtx3090") == [second, third, first]
    Registry(place).set_alias("latest", second, "by hand")
    assert answers_by("cpu-1t", "cpu-2t") == [second, third]
    (place / first / "manifest.json").unlink()
    assert answers_by("rtx3090") == [default]


def test_cpu_campaigns_do_not_change_the_default_device(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    publish(tmp_path / "snapshots", {"cpu-2t": shipped_heads("cpu-2t")})
    answer = trappm.predict("test_resnet", batch_size=4)
    assert (answer.device, answer.device_is_default) == ("a100-40gb", True)
    assert " A100 40 GB (default)" in str(answer)


@pytest.mark.extension("onnx")
def test_files_of_one_batch_size_are_predicted_at_it(ask, tmp_path):
    export_onnx("test_resnet", 64, tmp_path / "fixed.onnx", batch_size=3)
    export_onnx("test_resnet", 64, tmp_path / "open.onnx")
    fixed, free = ask(tmp_path / "fixed.onnx"), ask(tmp_path / "open.onnx", batch_size=3)
    assert fixed.batch_size == 3
    assert fixed.simulated_memory == free.simulated_memory
    on_gpu = trappm.predict(tmp_path / "fixed.onnx", device="a100")
    assert "known at batch 3 only: the file has this one" in on_gpu.missing["largest_batch"]
    with pytest.raises(InputError, match="fixed at 3"):
        ask(tmp_path / "fixed.onnx", batch_size=4)
