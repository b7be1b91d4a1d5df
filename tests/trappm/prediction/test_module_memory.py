"""Memory of names, files and any module: what it consists of, losses, targets, training loops."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, global_mean_pool

import trappm
from trappm.profiler.errors import InputError, TraceTimeoutError, UnsupportedModelError
from trappm.profiler.memory.breakdown import Part
from trappm.profiler.memory.simulation import memory_of
from trappm.profiler.trace import trace
from trappm.profiler.tracing import known_values


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


def test_predicted_memory_is_that_of_the_traced_step():
    answer = small(batch_size=16, optimizer="adam")
    step = trace("resnet10t", 64)
    parts = answer.memory_breakdown.parts_mib
    simulated = memory_of(step, 16, "adam").reserved_with_workspace_mib
    assert answer.memory_mib > simulated
    assert sum(parts.values()) == pytest.approx(answer.memory_mib, rel=0.01)
    parameters_mib = sum(step.allocations.parameter_bytes) / 2**20
    assert parts[Part.OPTIMIZER] == pytest.approx(2 * parameters_mib)


def test_the_breakdown_names_modules_lines_and_operators():
    breakdown = small(batch_size=256).memory_breakdown
    assert {"conv1.0", "layer1"} <= {m.name for m in breakdown.modules.walk(2)}
    inside = sum(child.size_mib for child in breakdown.modules.children.values())
    parts = breakdown.parts_mib
    assert inside <= parts[Part.ACTIVATIONS] + parts.get(Part.BACKWARD, 0.0) + 1e-6
    largest = breakdown.largest[0]
    assert largest.origin.line.startswith("timm/")
    assert largest.origin.operator == "convolution"


def test_modules_with_two_inputs_and_their_own_loss_are_predicted():
    answer = ask(Siamese(), images(2), images(2), loss=distance)
    assert (answer.batch_size, answer.fits, answer.missing) == (2, True, {})
    assert answer.step_time_ms > 0
    one, two = (
        ask(Siamese(), images(2), images(2), loss=distance, batch_size=size).memory_breakdown
        for size in (256, 512)
    )
    activations = [b.parts_mib[Part.ACTIVATIONS] for b in (one, two)]
    assert activations[1] == pytest.approx(2 * activations[0], rel=1e-4)
    assert two.parts_mib[Part.INPUTS] == 2 * 512 * 192 * 4 / 2**20


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("model.pt", {}, "holds weights, not a step; export"),
        ("torchvision.models.resnet50()", {}, "or give a name: did you mean 'resnet50'"),
        ("resnet10t", {"example_input": images(2)}, "know their input"),
        (Siamese(), {}, "give an example of its input"),
        (Siamese(), {"example_input": images(2)}, r"'right'; give example_input=\(left, right\)"),
        (Siamese(), {"example_input": (torch.empty(0, 3, 8, 8), images(2))}, "must not be empty"),
        (Siamese, {"example_input": images(2)}, "the model is the class Siamese"),
        ("resnet10t", {"optimizer": "lion"}, "'lion'; known are sgd, momentum, adam, adamw"),
        ("resnet10t", {"optimizer": torch.optim.RMSprop}, r"RMSprop; .*momentum \(one tensor"),
        ("resnet10t", {"optimizer": torch.optim.AdamW(nn.Linear(8, 8).parameters(), amsgrad=True)},
         "amsgrad=True, which keeps a third tensor"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(model, options, message, refused):
    with refused(message):
        trappm.predict(model, **options)


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
        ((), {"loss": F.cross_entropy}),
        ((), {"loss": nn.BCEWithLogitsLoss(), "targets": VALUES}),
    ],
)
def test_targets_scale_with_the_batch(inputs, options):
    answer = ask(classifier(), images(12), *inputs, **options)
    assert answer.batch_size == 12
    assert answer.largest_batch > 1000


def test_modules_that_take_targets_receive_them():
    class OwnTargets(nn.Linear):
        def forward(self, x, targets=None):
            return F.mse_loss(super().forward(x), targets)

    assert ask(OwnTargets(5, 5), VALUES, targets=VALUES).largest_batch > 1000


def test_targets_count_as_inputs_of_a_training_step():
    pixels = torch.zeros(4, 64, 64, dtype=torch.long)
    module, inputs = nn.Conv2d(3, 5, 1), torch.empty(4, 3, 64, 64)
    plain_mib, targets_mib = (
        ask(module, inputs, **options).memory_breakdown.parts_mib.get(Part.INPUTS)
        for options in ({"loss": nn.CrossEntropyLoss()}, {"targets": pixels})
    )
    assert targets_mib - plain_mib == pixels.nbytes / 2**20


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ((), {"loss": nn.TripletMarginLoss()}, "needs targets; .*targets=labels"),
        ((LABELS,), {"loss": torch.sum, "targets": LABELS}, "too many positional arguments"),
        ((LABELS,), {"loss": lambda output: output.sum()}, "does not take output and targets"),
        ((), {"loss": nn.CrossEntropyLoss}, "loss is CrossEntropyLoss; give a function"),
        ((), {"loss": "cross_entropy"}, "loss is 'cross_entropy'; give a function"),
        ((torch.rand(12, 1),), {}, r"shape \(12, 1\) are not the classes of an output of shape"),
        ((), {"loss": nn.CrossEntropyLoss(reduction="none")}, r"the loss has the shape \(\d+,\)"),
    ],
)
def test_problems_with_the_loss_are_explained(inputs, options, message):
    with pytest.raises(InputError, match=message):
        ask(classifier(), images(12), *inputs, **options)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output: F.cross_entropy(output, LABELS),
        lambda output: F.binary_cross_entropy_with_logits(output, VALUES),
    ],
)
def test_labels_in_a_closure_fix_the_batch_size(loss):
    answer = ask(classifier(), images(12), loss=loss)
    assert answer.fits
    missing = answer.missing["largest_batch"]
    assert re.search("batch 12 only: at other batch sizes .*targets=labels", missing)


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


@pytest.mark.parametrize("how", ["in part", "in place", "function"])
def test_modules_compiled_in_part_are_predicted_as_eager_ones(how, capfd):
    plain = ask(InParts("no"), images(12), LABELS)
    module = InParts(how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = ask(module, images(12), LABELS)
        breakdown = answer.memory_breakdown
    assert answer.model == "InParts"
    assert answer.memory_mib == plain.memory_mib
    assert breakdown.parts_mib == plain.memory_breakdown.parts_mib
    assert any("eager" in remark for remark in answer.remarks) == (how != "function")
    assert "".join(capfd.readouterr()) == ""


def test_compiled_module_gets_no_eager_figure_as_its_own():
    module = InParts("no")
    eager, compiled = (ask(x, images(12), LABELS) for x in (module, torch.compile(module)))
    assert (compiled.model, compiled.execution) == ("InParts", "compile")
    assert compiled.step_time_ms not in (None, eager.step_time_ms)
    assert compiled.memory_mib == pytest.approx(eager.memory_mib, rel=0.2)
    assert compiled.remarks[0].startswith("In eager mode")
    with pytest.raises(UnsupportedModelError, match="of eager steps"):
        _ = compiled.memory_breakdown
    by_choice = ask(torch.compile(module), images(12), LABELS, execution="eager")
    assert by_choice.memory_mib == eager.memory_mib


class Choosy(Siamese):
    """Runs only the images of more than 0, with noise and a batch norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        chosen = self.norm(x)[x.sum((1, 2, 3)) > 0]
        return self.net(chosen + torch.rand_like(chosen))


def chosen(count):
    x = torch.full((8, 3, 8, 8), -1.0)
    x[:count] = 1.0
    return x


def test_data_dependent_steps_are_measured_for_the_example():
    module = Choosy()
    before, random = [t.clone() for t in module.state_dict().values()], torch.get_rng_state()
    few, many = (ask(module, chosen(count), loss=torch.sum) for count in (2, 7))
    assert few.simulated_memory.live_mib < many.simulated_memory.live_mib
    assert any(r.startswith("Measured for these inputs") for r in few.remarks)
    assert few.largest_batch is None
    assert "batch 8 only: its operators depend on the values" in few.missing["largest_batch"]
    assert few.step_time_ms < many.step_time_ms
    assert few.memory_breakdown.total_mib == pytest.approx(few.memory_mib, rel=0.01)
    assert all(map(torch.equal, before, module.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state())


def test_arguments_that_pytorch_refuses_are_refused():
    class Embedded(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))

    ids = torch.full((4, 2), 9)
    with pytest.raises(InputError, match="multiplies float64 by another data type"):
        ask(nn.Linear(4, 4), torch.rand(2, 4, dtype=torch.float64))
    with pytest.raises(InputError, match="index 9 is out of range of 9 rows"):
        ask(Embedded(), ids)
    with pytest.raises(InputError, match="index 3 is out of range of 3 classes"):
        ask(Embedded(), ids - 1, targets=torch.full((4,), 3))
    assert ask(Embedded(), ids - 1, targets=torch.full((4,), -100)).fits


def all_pairs(output):
    logits = output @ output.T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def test_a_loss_of_all_pairs_is_known_at_its_batch_only():
    few, many = (ask(nn.Linear(8, 8), torch.rand(n, 8), loss=all_pairs) for n in (64, 8192))
    assert many.largest_batch is None
    assert "grow faster than the batch" in many.missing["largest_batch"]
    assert many.memory_mib - few.memory_mib > 2 * 4 * 8192**2 / 2**20
    assert many.step_time_ms > 3 * few.step_time_ms


class OnGraphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.head = GCNConv(4, 8), nn.Linear(8, 3)

    def forward(self, data):
        return self.head(global_mean_pool(self.near(data.x, data.edge_index), data.batch))


def test_graphs_of_pytorch_geometric_are_inputs():
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = [Data(x=torch.rand(nodes, 4), edge_index=edges) for nodes in (3, 5, 4)]
    few, many = (
        trappm.predict(
            OnGraphs(), example_input=Batch.from_data_list(batch), device="a100",
            targets=torch.zeros(len(batch), dtype=torch.long),
        )
        for batch in (graphs, 500 * graphs)
    )  # fmt: skip
    assert (few.batch_size, many.batch_size) == (12, 6000)
    assert few.simulated_memory.live_mib < many.simulated_memory.live_mib
    assert few.step_time_ms > 0


def test_data_dependent_steps_need_values_and_memory(monkeypatch):
    with pytest.raises(UnsupportedModelError, match="needs the values of a tensor"):
        ask(Choosy(), chosen(2).to("meta"), loss=torch.sum)
    monkeypatch.setattr(known_values, "available_memory_mib", lambda: 8.0)
    with pytest.raises(UnsupportedModelError, match=r"too little memory .* with fewer samples"):
        ask(Choosy(), chosen(2), loss=torch.sum, batch_size=10_000)


def test_a_batch_norm_needs_two_values_per_channel_in_training():
    pooled = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Flatten())
    one = torch.empty(1, 3, 8, 8)
    with pytest.raises(InputError, match="batch size of 2 or more"):
        ask(pooled, one)
    assert ask(pooled, one, phase="infer").memory_mib > 0
    larger = nn.Sequential(nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4), nn.Flatten())
    assert ask(larger, one).memory_mib > 0, "four values per channel"


def test_modules_that_cannot_be_traced_are_refused_with_a_remedy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(nn.Linear(8, 4), torch.rand(2, 8))
        quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)))
    for module, reason in ((scripted, "give the module"), (quantized, "on CPUs only")):
        with pytest.raises(UnsupportedModelError, match=reason):
            ask(module, torch.rand(2, 8), phase="infer")
    with pytest.raises(InputError, match="a sparse tensor among the inputs"):
        ask(Siamese(), images(4), images(4).to_sparse())


def test_options_of_the_training_loop_change_the_breakdown(as_json, refusal):
    words = "predict resnet10t --input-size 64 --optimizer adamw --breakdown"
    plain, fused, often = (
        as_json(words, *options.split())["memory_breakdown"]["parts_mib"]
        for options in ("", "--implementation fused", "--accumulation 4")
    )
    assert plain["optimizer_step"] > fused.get("optimizer_step", 0.0)
    assert often["gradients"] > 0.99 * often["optimizer_state"] / 2
    refusal(words, "--implementation", "quick")
    words = "predict resnet18 --device a100 --batch-size 64"
    usual, grown = (as_json(words, *o.split())["memory_mib"] for o in ("", "--expandable-segments"))
    assert grown < usual


class Deciding(nn.Module):
    """A classifier of many layers whose operators depend on computed values."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(192, 10)

    def forward(self, images):
        scores = self.head(images.flatten(1))
        for _ in range(50):
            if scores.mean() < 1e9:
                scores = scores * 2
        return scores


def test_running_on_values_ends_after_the_limit_with_one_line(refused):
    words = "Deciding depends on the values.*more than 0.001 s.*more trace_seconds"
    with refused(words, TraceTimeoutError):
        ask(Deciding(), torch.rand(4, 3, 8, 8), targets=LABELS[:4], trace_seconds=0.001)


def test_traces_without_values_and_names_have_no_limit(module_home):
    answer = ask(classifier(), images(12), LABELS, trace_seconds=0.001)
    assert answer.memory_source == "traced"
    assert trappm.predict("test_resnet", device="a100", trace_seconds=0.001).memory_mib


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "2"])
def test_a_limit_that_is_no_time_is_refused(seconds):
    with pytest.raises(InputError, match="trace_seconds is"):
        ask(classifier(), images(12), LABELS, trace_seconds=seconds)
