"""Steps that look at values, and what they are called with."""

import dataclasses
import math
from collections import UserDict
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from small_modules import Function
from torch import Tensor, nn

import trappm
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.traced_step import KernelKind
from trappm.profiler.tracing.tracer import Tracer

IMAGES, CLASSES = torch.rand(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)


@pytest.fixture(autouse=True, scope="module")
def home(module_home):
    return module_home


def classifier(check=lambda y: None):
    def body(self, x):
        y = self.head(x.flatten(1))
        check(y)
        return y

    return Function(body, head=nn.Linear(3072, 10))


def ask(module, example=IMAGES, targets=CLASSES, **options):
    settings = {"device": "a100", "precision": "fp32", "optimizer": "adam"} | options
    return trappm.predict(module, example_input=example, targets=targets, **settings)


def raise_if(unusual):
    if unusual:
        raise ValueError("unusual")


GUARDS = {
    "any NaN": lambda y: raise_if(torch.isnan(y).any()),
    "all finite": lambda y: raise_if(not torch.isfinite(y).all()),
    "item": lambda y: raise_if(torch.isinf(y).any().item()),
    "logical": lambda y: raise_if(torch.logical_or(y.isnan(), y.isinf()).any()),
    "number": lambda y: raise_if(torch.isnan(y).sum() > 0),
    "number of all": lambda y: raise_if((~torch.isfinite(y)).sum().item()),
}


@cache
def plain_answer(phase="train"):
    return ask(classifier(), phase=phase)


@pytest.mark.parametrize(
    ("name", "phase"), [*((name, "train") for name in GUARDS), ("any NaN", "infer")]
)
def test_a_guard_against_unusual_numbers_changes_nothing_but_a_remark(name, phase):
    plain, guarded = plain_answer(phase), ask(classifier(GUARDS[name]), phase=phase)
    assert guarded.memory_mib == pytest.approx(plain.memory_mib, rel=0.01)
    # The guard has kernels of its own, which a small step feels.
    assert plain.step_time_ms <= guarded.step_time_ms < 2.5 * plain.step_time_ms
    assert guarded.largest_batch == pytest.approx(plain.largest_batch, rel=0.01)
    assert "looks for infinite numbers and NaN" in " ".join(guarded.remarks)
    assert "looks for" not in " ".join(plain.remarks)


GUARDS_BY_VALUES = {
    "limit": lambda y: raise_if(y.mean() > 1e9),
    "close": lambda y: raise_if(torch.allclose(y, y + 1)),
    "math": lambda y: raise_if(math.isnan(y.mean().item())),
    "loop": lambda y: [None for _ in iter(lambda: bool(y.norm() < 1e9), True)],
    "to the CPU": lambda y: y.mean().detach().cpu().item(),
    "NumPy": lambda y: y.detach().cpu().numpy().mean(),
    "list": lambda y: y.detach().tolist(),
}


@pytest.mark.parametrize("guard", GUARDS_BY_VALUES.values(), ids=GUARDS_BY_VALUES)
def test_a_step_that_only_looks_at_values_is_known_at_all_batch_sizes(guard):
    plain, guarded = plain_answer(), ask(classifier(guard))
    assert guarded.missing == {}
    assert guarded.largest_batch == pytest.approx(plain.largest_batch, rel=0.02)
    assert "they are those of the example" in " ".join(guarded.remarks)


@pytest.mark.parametrize("limit", [-1e9, 1e9])
def test_the_branch_of_the_example_is_taken(limit):
    """One that widens the output 100,000 times."""

    def body(self, x):
        y = self.head(x.flatten(1))
        return y.repeat(1, 100_000) if y.mean() < limit else y

    plain, answer = plain_answer(), ask(Function(body, head=nn.Linear(3072, 10)))
    assert (answer.largest_batch < 0.5 * plain.largest_batch) == (limit > 0)


def test_activations_that_are_kept_on_the_cpu_are_remarked_on():
    def body(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.head(x.flatten(1).relu())

    offloaded = ask(Function(body, head=nn.Linear(3072, 10)), torch.rand(256, 3, 32, 32), None)
    assert "the time does not include these copies" in " ".join(offloaded.remarks)
    assert "these copies" not in " ".join(ask(classifier(GUARDS["item"])).remarks)


def test_work_on_the_host_is_not_of_the_step():
    def on_host(y):
        copied = y.mean().detach().cpu()
        return (copied.exp() * copied + copied.softmax(0).norm()).item()

    read, worked = (ask(classifier(g)) for g in (GUARDS_BY_VALUES["to the CPU"], on_host))
    assert worked.step_time_ms == pytest.approx(read.step_time_ms)
    assert worked.memory_mib == read.memory_mib


class CheckedOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.is_checked = nn.Linear(3072, 10), False

    def forward(self, x):
        if not self.is_checked:
            self.is_checked = True
            raise_if(x.max() > 1e6)
        y = self.head(x.flatten(1))
        return y if y.norm() < 1e9 else y.repeat(1, 100_000)


def each_sample(self, x):
    y = self.head(x.flatten(1))
    wide = [bool(value) for value in y.sum(1) > 1e9]
    return y.repeat(1, 100_000) if any(wide) or y.norm() > 1e9 else y


@pytest.mark.parametrize(
    "module", [CheckedOnce(), Function(each_sample, head=nn.Linear(3072, 10))], ids=["once", "each"]
)
def test_values_that_are_not_read_each_time_are_those_of_one_batch_size(module):
    assert ask(module).memory_source == "run on the example"


def test_a_whole_number_of_the_example_is_not_taken_at_other_batch_sizes():
    """It may count samples."""

    def body(self, x):
        y = self.head(x.flatten(1))
        return y[: int((y > -1e9).any(1).sum())]

    answer = ask(Function(body, head=nn.Linear(3072, 10)))
    assert answer.memory_source == "run on the example"
    assert answer.largest_batch is None


def test_a_guard_of_known_numbers_looks_at_them():
    def body(self, x, mask):
        raise_if(not torch.isfinite(mask).all())
        return self.head(x.flatten(1))

    module = Function(body, head=nn.Linear(3072, 10))
    answer = ask(module, (IMAGES, torch.ones(16, 4, dtype=torch.long)))
    assert answer.missing == {}
    assert answer.memory_source == "traced"


@dataclasses.dataclass(frozen=True)
class Batch:
    images: Tensor
    classes: Tensor


class Plain:
    def __init__(self, images, classes):
        self.images, self.classes = images, classes


class Slots:
    __slots__ = ("__classes", "__weakref__", "images")

    def __init__(self, images, classes):
        self.images, self.__classes = images, classes

    @property
    def classes(self):
        return self.__classes


class Uncopied(Plain):
    def __copy__(self):
        raise RuntimeError("holds a lock")


class ReadOnly(Mapping):
    def __init__(self, **parts):
        self._parts = parts

    def __getitem__(self, name):
        return self._parts[name]

    def __iter__(self):
        return iter(self._parts)

    def __len__(self):
        return len(self._parts)


class OfBatch(nn.Module):
    """Takes a record, or one in another container, and returns its loss."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3072, 10)

    def forward(self, batch):
        while not hasattr(batch, "images"):
            batch = batch["batch"] if hasattr(batch, "keys") else batch[0]
        return F.cross_entropy(self.head(batch.images.flatten(1)), batch.classes)


@pytest.mark.parametrize(
    "nested",
    [
        lambda b: (b, 1), lambda b: UserDict(batch=b), lambda b: ReadOnly(batch=b),
        lambda b: Plain(b.images, b.classes), lambda b: Slots(b.images, b.classes),
        lambda b: MappingProxyType({"batch": b}),
    ],
)  # fmt: skip
def test_records_and_containers_of_them_are_batches(nested):
    answer = ask(OfBatch(), (nested(Batch(IMAGES, CLASSES)),), None, loss=lambda loss: loss)
    assert answer.missing == {}
    assert answer.batch_size == 16
    assert answer.largest_batch > 16


def test_an_object_that_cannot_be_copied_is_refused_in_one_line():
    with pytest.raises(trappm.TrappmError, match=r"Uncopied cannot be copied \(holds a lock\)"):
        ask(OfBatch(), (Uncopied(IMAGES, CLASSES),), None, loss=lambda loss: loss)


def test_objects_that_refer_to_themselves_and_functions_stay_what_they_are():
    """They are passed on, and containers elsewhere keep them."""

    class Node:
        def __init__(self):
            self.mask, self.me = CLASSES, [self]

    def scale(x):
        return x

    scale.factor = torch.ones(1)

    def body(self, x, node, scale):
        assert node.me[0] is node
        return self.head(scale(x).flatten(1))

    answer = ask(Function(body, head=nn.Linear(3072, 10)), (IMAGES, Node(), scale))
    assert answer.missing == {}
    assert torch.utils._pytree.tree_leaves({"scale": scale}) == [scale]


class Forces(nn.Module):
    """An energy with its gradient, as models of molecules have them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, positions):
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.body(positions).sum()
            return torch.autograd.grad(energy, positions, create_graph=self.training)[0]


def test_inference_with_a_gradient_runs_where_the_caller_computes_gradients():
    def body(self, positions):
        positions = positions.detach().requires_grad_()
        energy = self.head(positions).tanh().sum()
        return torch.autograd.grad(energy, positions)[0]

    module = Function(body, head=nn.Linear(3, 1))
    assert ask(module, torch.rand(32, 100, 3), None, phase="infer").missing == {}


@pytest.mark.parametrize("phase", ["train", "infer"])
def test_a_gradient_within_the_forward_pass_is_computed(phase):
    positions = torch.rand(32, 100, 3)
    targets = {"train": torch.rand(32, 100, 3), "infer": None}[phase]
    answer = ask(
        Forces(),
        positions,
        targets,
        phase=phase,
        **({} if targets is None else {"loss": F.mse_loss}),
    )
    assert answer.missing == {}


class MomentumEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(512, 128), nn.Linear(512, 128)
        self.k.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
                k.data = k.data * 0.99 + q.data * 0.01
        return F.mse_loss(self.q(x), self.k(x))


def test_parameters_can_be_set_in_the_forward_pass():
    answer = ask(MomentumEncoder(), torch.rand(256, 512), None, loss=lambda loss: loss)
    assert answer.missing == {}


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(80, 30)

    def forward(self, frames):
        return self.head(frames).log_softmax(-1).transpose(0, 1)


@pytest.mark.parametrize(("joined", "reduction"), [(True, "mean"), (False, "none")])
def test_ctc_keeps_the_probabilities_of_prefixes(joined, reduction):
    lengths = torch.full((8,), 100), torch.full((8,), 20)
    texts = torch.randint(1, 30, (160,) if joined else (8, 20))

    def loss(output):
        return F.ctc_loss(output, texts, *lengths, reduction=reduction, zero_infinity=True).mean()

    answer = ask(Speech(), torch.rand(8, 100, 80), None, loss=loss)
    assert answer.step_time_ms is not None
    prefixes = 8 * 100 * 41 * 4
    sizes = [t.size_mib * 2**20 for t in answer.memory_breakdown.largest]
    assert prefixes in sizes


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_gradient_is_refused_by_its_name(kind):
    def body(self, ids):
        return self.head(self.words(ids).reshape(len(ids), -1)[:, :64])

    ids = torch.zeros(16, 8, dtype=torch.long)
    sparse = Function(body, words=kind(1000, 64, sparse=True), head=nn.Linear(64, 10))
    dense = Function(body, words=kind(1000, 64), head=nn.Linear(64, 10))
    with pytest.raises(trappm.TrappmError, match="sparse=True"):
        raise trappm.TrappmError(ask(sparse, ids).missing["step_time_ms"])
    assert ask(dense, ids).missing == {}


def test_ctc_has_a_kernel_in_each_pass():
    texts, lengths = torch.zeros(8, 20).long(), (torch.full((8,), 100), torch.full((8,), 20))
    tracer = Tracer(
        on_meta(Speech(), None),
        ExampleInputs.of(torch.rand(8, 100, 80)),
        batch_sizes=(8, 8),
        loss=lambda output, _: F.ctc_loss(output, texts, *lengths),
    )
    table = tracer.trace().kernels.table
    assert int(table.counts[table.kinds == KernelKind.OTHER].sum()) == 2


def test_a_model_may_return_its_ctc_loss():
    class Trained(Speech):
        def forward(self, frames, classes, lengths, target_lengths):
            return F.ctc_loss(super().forward(frames), classes, lengths, target_lengths)

    lengths = torch.full((8,), 100), torch.full((8,), 20)
    example = torch.rand(8, 100, 80), torch.randint(1, 30, (8, 20)), *lengths
    assert ask(Trained(), example, None, loss=lambda loss: loss).missing == {}


@pytest.mark.parametrize(
    ("transform", "phase"), [(torch.func.grad, "train"), (torch.func.jacrev, "infer")]
)
def test_a_model_may_differentiate_by_functions(transform, phase):
    def body(self, x):
        return torch.func.vmap(transform(lambda row: self.layers(row).sum()))(x)

    layers = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
    options = {"targets": torch.rand(128, 3), "loss": F.mse_loss} if phase == "train" else {}
    options = {"targets": None, "phase": phase} | options
    answer = ask(Function(body, layers=layers), torch.rand(128, 3), **options)
    plain = ask(layers, torch.rand(128, 3), **options | {"targets": torch.rand(128, 1)[:, :1]})
    assert answer.missing == {}
    assert answer.largest_batch > 128
    assert answer.step_time_ms > 1.5 * plain.step_time_ms  # a backward pass within the forward one
