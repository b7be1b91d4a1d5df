import pytest

from trappm.profiler.errors import InputError
from trappm.profiler.models import pool as pool_module
from trappm.profiler.models.pool import PoolGroup, PoolSpec, build_pool
from trappm.profiler.records import Execution, Optimizer

SMALL = {
    "architectures": ("resnet18", "vgg1[13]"), "batch_sizes": (4, 1), "input_sizes": (64,),
}  # fmt: skip


def group(**changes):
    return PoolGroup(**{**SMALL, **changes})


def pool_of(*groups):
    return build_pool(PoolSpec(groups=groups))


def test_a_group_contains_every_combination_in_a_fixed_order():
    pool = pool_of(group(optimizers=("sgd", "adam"), executions=("eager", "compile")))
    assert [(c.architecture, c.batch_size, c.optimizer, c.execution) for c in pool] == [
        (architecture, batch_size, optimizer, execution)
        for architecture in ("resnet18", "vgg11", "vgg13")
        for batch_size in (1, 4)
        for optimizer in (Optimizer.ADAM, Optimizer.SGD)
        for execution in (Execution.COMPILE, Execution.EAGER)
    ]


def test_too_large_groups_are_refused_before_expansion(monkeypatch):
    made = []
    monkeypatch.setattr(pool_module, "Configuration", lambda **fields: made.append(fields))
    with pytest.raises(InputError, match="more than 1,000,000"):
        pool_of(group(batch_sizes=tuple(range(1, 400_000))))
    assert made == []


def test_families_expand_to_their_architectures():
    by_family = pool_of(group(architectures=(), families=("vgg",)))
    by_names = pool_of(group(architectures=("vgg*",)))
    assert by_family == by_names
    both = group(architectures=("resnet18",), families=("vgg",), batch_sizes=(1,))
    assert len(pool_of(both)) == 1 + len(by_names) // 2
    with pytest.raises(InputError, match="did you mean 'vgg'"):
        pool_of(group(families=("vggg",)))


def test_native_sizes_are_resolved_and_deduplicated():
    named = ("resnet18", "mnasnet_small", "test_vit")
    pool = pool_of(group(architectures=named, input_sizes=("native", 224), batch_sizes=(1,)))
    assert {(c.architecture, c.input_size) for c in pool} == {
        ("resnet18", 224), ("mnasnet_small", 224), ("test_vit", 160), ("test_vit", 224),
    }  # fmt: skip
    with pytest.raises(InputError, match="input_sizes holds 'mine'"):
        group(input_sizes=("mine",))
