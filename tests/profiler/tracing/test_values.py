"""Steps that look at values, and what they are called with."""

import dataclasses
from functools import cache
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from small_modules import Function
from torch import Tensor, nn

import trappm

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
    "item": lambda y: raise_if(torch.logical_or(y.isnan(), y.isinf()).any().item()),
    "number": lambda y: raise_if((~torch.isfinite(y)).sum() > 0),
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
    "NumPy": lambda y: y.detach().cpu().numpy().mean(),
    "list": lambda y: y.detach().tolist(),
}


@pytest.mark.parametrize("guard", GUARDS_BY_VALUES.values(), ids=GUARDS_BY_VALUES)
def test_a_step_that_only_looks_at_values_is_known_at_all_batch_sizes(guard):
    plain, guarded = plain_answer(), ask(classifier(guard))
    assert guarded.missing == {}
    assert guarded.largest_batch == pytest.approx(plain.largest_batch, rel=0.02)
    assert "they are those of the example" in " ".join(guarded.remarks)


def test_a_whole_number_of_the_example_is_not_taken_at_other_batch_sizes():
    """It may count samples."""

    def body(self, x):
        y = self.head(x.flatten(1))
        return y[: int((y > -1e9).any(1).sum())]

    answer = ask(Function(body, head=nn.Linear(3072, 10)))
    assert answer.memory_source == "run on the example"
    assert answer.largest_batch is None


@dataclasses.dataclass(frozen=True)
class Batch:
    images: Tensor
    classes: Tensor


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
        lambda b: (b, 1),
        lambda b: MappingProxyType({"batch": b}),
    ],
)
def test_records_and_containers_of_them_are_batches(nested):
    answer = ask(OfBatch(), (nested(Batch(IMAGES, CLASSES)),), None, loss=lambda loss: loss)
    assert answer.missing == {}
    assert answer.batch_size == 16
    assert answer.largest_batch > 16


def test_a_sparse_gradient_is_refused_by_its_name():
    layers = {"words": nn.EmbeddingBag(1000, 64, sparse=True), "head": nn.Linear(64, 10)}
    sparse = Function(lambda self, ids: self.head(self.words(ids)), **layers)
    with pytest.raises(trappm.TrappmError, match="sparse=True"):
        ask(sparse, torch.zeros(16, 8, dtype=torch.long))


def test_inference_with_a_gradient_runs_where_the_caller_computes_gradients():
    def body(self, positions):
        positions = positions.detach().requires_grad_()
        energy = self.head(positions).tanh().sum()
        return torch.autograd.grad(energy, positions)[0]

    module = Function(body, head=nn.Linear(3, 1))
    assert ask(module, torch.rand(32, 100, 3), None, phase="infer").missing == {}


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
