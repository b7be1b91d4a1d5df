"""`trappm.predict` of names, files and modules, with a small snapshot."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from onnx_export import export_onnx
from torch import nn

import trappm
from trappm import cli
from trappm.learner.heads.device_heads import train_heads
from trappm.learner.heads.predictions import TrainedHeads
from trappm.learner.paper.encoder import train_encoder
from trappm.learner.paper.presets import LAPTOP
from trappm.learner.snapshots.registry import Registry
from trappm.learner.snapshots.snapshot import load_snapshot, save_snapshot
from trappm.learner.workload import Workload
from trappm.prediction.comparison import comparable
from trappm.prediction.snapshot_choice import SHIPPED
from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.models import zoo
from trappm.profiler.records import Phase
from trappm.profiler.static_profile import graph_template
from trappm.terminal.prediction_tables import print_comparison, print_prediction


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """Trained a little, on the graphs of three models: what it predicts is not judged here."""
    preset = replace(
        LAPTOP,
        encoder=replace(LAPTOP.encoder, widths=(8, 8), steps=2),
        head=replace(LAPTOP.head, widths=(8,), hidden=(8,), steps=2, members=2),
    )
    names = ("test_resnet", "test_vit", "test_convnext")
    graphs = [graph_template(name, 64).at(batch) for name in names for batch in (1, 2, 4, 8)]
    encoder = train_encoder(graphs, preset.encoder, np.random.default_rng(0))
    heads = train_heads(
        [Workload(graph=graph) for graph in graphs], np.full((len(graphs), 3), 10.0),
        groups=[name for name in names for _ in range(4)], preset=preset.head,
        generator=np.random.default_rng(0),
    )  # fmt: skip
    return save_snapshot(
        tmp_path_factory.mktemp("snapshots"),
        encoder=encoder, heads={"cpu-2t": {Phase.TRAIN: TrainedHeads(heads, ())}},
        source_device="cpu-2t", preset=preset, labels=[],
        fields={"campaign": "test", "errors": {"cpu-2t": {}}, "label_counts": {}},
    ).folder  # fmt: skip


def test_names_modules_and_files_of_one_model_agree(snapshot, tmp_path):
    options = {"batch_size": 4, "snapshot": snapshot, "device": "cpu-2t"}
    by_name = trappm.predict("test_convnext", input_size=64, **options)
    module = zoo.create_model("test_convnext", 64)
    by_module = trappm.predict(module, example_input=torch.empty(1, 3, 64, 64), **options)
    export_onnx("test_convnext", 64, tmp_path / "m.onnx")
    by_file = trappm.predict(tmp_path / "m.onnx", **options)
    assert tuple(by_module) == pytest.approx(tuple(by_name))
    assert tuple(by_file) == pytest.approx(tuple(by_name), rel=0.02)  # its step is rebuilt
    mixed = [module, "test_convnext", tmp_path / "m.onnx"]
    image = torch.empty(1, 3, 64, 64)
    both = trappm.compare(
        mixed, "cpu-2t", example_input=image, input_size=64, batch_size=4, snapshot=snapshot
    )
    for together, alone in zip(both, (by_module, by_name, by_file), strict=True):
        # Several rows at once are multiplied in another order: the last digit may differ.
        assert tuple(together) == pytest.approx(tuple(alone), rel=1e-9)
        assert together.simulated_memory == alone.simulated_memory
        for metric, interval in alone.intervals.items():
            assert together.intervals[metric] == pytest.approx(interval, rel=1e-9)
    assert [p.memory_source for p in (by_name, by_module, by_file)] == [
        "traced", "traced", "rebuilt",
    ]  # fmt: skip
    assert by_module.simulated_memory == by_name.simulated_memory
    assert by_file.simulated_memory.live_mib == pytest.approx(
        by_name.simulated_memory.live_mib, rel=0.02
    )
    assert by_file.memory_remark is None
    fields = json.loads(json.dumps(by_file.to_dict()))
    assert fields["memory_source"] == "rebuilt"
    assert fields["simulated_memory"]["reserved_mib"] > 0


def test_simulated_memory_depends_on_the_settings(snapshot, capsys):
    options = {"batch_size": 8, "input_size": 64, "snapshot": snapshot, "device": "cpu-2t"}
    plain, adam, adamw, mixed = (
        trappm.predict("test_resnet", **options, **settings)
        for settings in (
            {},
            {"optimizer": "adam"},
            {"optimizer": "adamw"},
            {"precision": "amp-fp16"},
        )
    )
    assert adamw.simulated_memory == adam.simulated_memory
    memory = [p.simulated_memory.live_mib for p in (plain, adam, mixed)]
    assert memory[1] > memory[0] > memory[2]
    train, inference = (
        trappm.predict("test_resnet", batch_size=8, input_size=64, device="rtx3090", phase=phase)
        for phase in ("train", "infer")
    )
    assert inference.simulated_memory.live_mib < train.simulated_memory.live_mib / 2
    print_prediction(mixed, explain=True)
    assert "Memory by simulation (traced): tensors " in capsys.readouterr().out


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


def test_predicting_does_not_change_the_module(snapshot):
    module = Hooked().train()
    module.norm.eval()
    module(torch.rand(2, 2, 9, 7)).sum().backward()
    module.calls.clear()
    tensors = [*module.parameters(), *module.buffers(), module.offset]
    before = [t.detach().clone() for t in tensors]
    gradients = [p.grad.clone() for p in module.parameters()]
    example = torch.rand(5, 2, 9, 7)
    prediction = trappm.predict(module, example_input=example, snapshot=snapshot, device="cpu-2t")
    assert prediction.batch_size == 5
    assert prediction.model == "Hooked"
    assert prediction.memory_source == "traced", prediction.memory_remark
    after = [*module.parameters(), *module.buffers(), module.offset]
    assert all(a is b for a, b in zip(after, tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert all(a.device == b.device for a, b in zip(after, before, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), gradients, strict=True))
    assert (module.training, module.norm.training) == (True, False)
    assert len(module.convolution._forward_hooks) == 1
    assert module(torch.rand(2, 2, 9, 7)).shape == (2, 3)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 100)

    def forward(self, ids):
        return self.head(self.encoder(self.table(ids)))


def test_token_ids_and_vectors_can_be_inputs(snapshot):
    ids = torch.zeros(3, 12, dtype=torch.long)
    prediction = trappm.predict(Tokens(), example_input=ids, snapshot=snapshot, device="cpu-2t")
    assert prediction.memory_source == "traced", prediction.memory_remark
    longer = trappm.predict(
        Tokens(),
        example_input=torch.zeros(3, 48, dtype=torch.long),
        snapshot=snapshot,
        device="cpu-2t",
    )
    assert longer.simulated_memory.live_mib > prediction.simulated_memory.live_mib
    layers = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2))
    prediction = trappm.predict(
        layers, example_input=torch.empty(7, 20), snapshot=snapshot, device="cpu-2t"
    )
    assert (prediction.batch_size, prediction.memory_source) == (7, "traced")


class Untraceable(nn.Module):
    """Its graph is known; in training it asks for values."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 1)

    def forward(self, x):
        x = self.convolution(x).mean((2, 3))
        return -x if self.training and x.sum() > 0 else x


def test_untraceable_steps_have_a_reason_and_no_simulated_memory(snapshot, capsys):
    images = torch.rand(2, 3, 8, 8)
    prediction = trappm.predict(
        Untraceable(), example_input=images, snapshot=snapshot, device="cpu-2t"
    )
    assert prediction.simulated_memory is None
    assert prediction.to_dict()["memory_source"] is None
    assert "cannot be traced" in prediction.memory_remark
    assert any("rough estimate" in remark for remark in prediction.remarks)
    print_prediction(prediction, explain=True)
    shown = capsys.readouterr().out
    assert "cannot be traced" in shown
    assert "Memory by simulation" not in shown


def test_extrapolations_are_reported_in_one_line(tmp_path, capsys):
    names = ("test_resnet", "test_vit", "test_convnext")
    graphs = [graph_template(name, 64).at(batch) for name in names for batch in (1, 2, 4, 8)]
    sizes = np.array([float(graph.macs.sum()) for graph in graphs])
    targets = np.stack([sizes / 1e6, 10 + sizes / 1e6, np.full(len(sizes), np.nan)], axis=1)
    heads = train_heads(
        [Workload(graph=graph) for graph in graphs], targets,
        groups=[name for name in names for _ in range(4)], preset=LAPTOP.head,
        generator=np.random.default_rng(0),
    )  # fmt: skip
    snapshot = save_snapshot(
        tmp_path, heads={"cpu-2t": {Phase.TRAIN: TrainedHeads(heads, ())}},
        source_device="cpu-2t", preset=LAPTOP, labels=[], fields={},
    ).folder  # fmt: skip
    question = {"device": "cpu-2t", "input_size": 64, "snapshot": snapshot}
    near = trappm.predict("test_resnet", batch_size=4, **question)
    assert near.beyond_labels == {}
    assert not any("Extrapolation" in remark for remark in near.remarks)
    far = trappm.predict("test_resnet", batch_size=8192, **question)
    end = targets[:, 0].max()
    assert far.beyond_labels["step_time_ms"] == pytest.approx(end)
    (line,) = (remark for remark in far.remarks if "largest measured step time" in remark)
    assert line.startswith(f"Extrapolation: the largest measured step time was {end:.0f} ms, ")
    assert json.loads(json.dumps(far.to_dict()))["remarks"] == list(far.remarks)
    print_prediction(far, explain=True)
    assert line in capsys.readouterr().out
    print_comparison([near, far], explain=True)
    assert line in " ".join(capsys.readouterr().out.split())
    kept, left_out = comparable([near, far], near_labels=True)
    assert kept == [near]
    assert [row["device"] for row in left_out] == ["cpu-2t"]
    assert comparable([far], near_labels=True) == ([far], [])  # an empty table would help less
    print_comparison(kept, left_out)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Left out: cpu-2t (far from all measurements of this device); show with " in shown
    assert "--device cpu-2t" in shown


def test_a_new_snapshot_does_not_hide_other_devices(tmp_path, monkeypatch):
    """What was the latest before answers for what the new one has no heads for."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    shipped = load_snapshot(SHIPPED).heads
    place = tmp_path / "snapshots"

    def published(**heads):
        heads = {device.replace("_", "-"): by for device, by in heads.items()}
        made = save_snapshot(
            place, heads=heads, source_device=next(iter(heads)), preset=LAPTOP, labels=[],
            fields={},
        )  # fmt: skip
        Registry(place).set_alias("latest", made.id, "published")
        return made.id

    def answers_by(device):
        return trappm.predict("test_resnet", batch_size=4, device=device).snapshot

    default = answers_by("cpu-2t")
    first = published(cpu_2t=shipped["cpu-1t"], rtx3090=shipped["rtx3090"])
    second = published(cpu_1t=shipped["cpu-2t"])
    assert (answers_by("cpu-1t"), answers_by("cpu-2t")) == (second, first)
    assert answers_by("v100") == default
    third = published(cpu_2t=shipped["cpu-2t"])
    by_device = [answers_by(device) for device in ("cpu-1t", "cpu-2t", "rtx3090")]
    assert by_device == [second, third, first]
    Registry(place).set_alias("latest", second, "by hand")
    assert (answers_by("cpu-1t"), answers_by("cpu-2t")) == (second, third)
    (place / first / "manifest.json").unlink()
    assert answers_by("rtx3090") == default


def test_cpu_campaigns_do_not_change_the_default_device(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    heads = {"cpu-2t": load_snapshot(SHIPPED).heads["cpu-2t"]}
    made = save_snapshot(
        tmp_path / "snapshots", heads=heads, source_device="cpu-2t", preset=LAPTOP, labels=[],
        fields={},
    )  # fmt: skip
    Registry(tmp_path / "snapshots").set_alias("latest", made.id, "published")
    answer = trappm.predict("test_resnet", batch_size=4)
    assert (answer.device, answer.device_is_default) == ("a100-40gb", True)
    assert " A100 40 GB (default)" in str(answer)
    named = trappm.predict("test_resnet", batch_size=4, device="a100")
    assert "(default)" not in str(named)
    assert str(named) == str(answer).replace(" (default)", "")
    every = trappm.compare("test_resnet", batch_size=4)
    assert not any(p.device.startswith("cpu") for p in every)
    assert cli.run(["predict", "test_resnet", "--batch-size", "4"]) == 0
    assert "A100 40 GB (default)" in capsys.readouterr().out.splitlines()[0]


def test_unsuitable_example_inputs_are_reported(snapshot):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    with pytest.raises(UnsupportedModelError, match="Invalid channel dimensions"):
        trappm.predict(
            model, example_input=torch.empty(2, 4, 8, 8), snapshot=snapshot, device="cpu-2t"
        )


def test_files_without_any_norm_get_a_remark(snapshot, tmp_path):
    """As exporters fold batch norms into convolutions, which the file does not tell."""
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    torch.onnx.export(plain, torch.empty(2, 3, 8, 8), tmp_path / "plain.onnx", dynamo=False)
    prediction = trappm.predict(tmp_path / "plain.onnx", snapshot=snapshot, device="cpu-2t")
    assert prediction.memory_source == "rebuilt"
    assert "no BatchNormalization" in prediction.memory_remark


def test_files_of_one_batch_size_are_predicted_at_it(snapshot, tmp_path):
    export_onnx("test_resnet", 64, tmp_path / "fixed.onnx", batch_size=3)
    export_onnx("test_resnet", 64, tmp_path / "open.onnx")
    fixed = trappm.predict(tmp_path / "fixed.onnx", snapshot=snapshot, device="cpu-2t")
    free = trappm.predict(tmp_path / "open.onnx", batch_size=3, snapshot=snapshot, device="cpu-2t")
    assert fixed.batch_size == 3
    assert fixed.memory_source == "rebuilt", fixed.memory_remark
    assert fixed.memory_remark is None
    assert fixed.simulated_memory == free.simulated_memory
    with pytest.raises(InputError, match="fixed at 3"):
        trappm.predict(tmp_path / "fixed.onnx", batch_size=4, snapshot=snapshot, device="cpu-2t")
