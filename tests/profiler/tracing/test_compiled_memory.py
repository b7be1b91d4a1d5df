"""Allocations of compiled steps: what AOT autograd keeps, and how memory comes and goes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from trappm.profiler.models.zoo import create_model
from trappm.profiler.records import MemoryFormat, Optimizer, Phase
from trappm.profiler.simulation.memory_simulation import simulate_memory
from trappm.profiler.simulation.step_trace import Event, StepTrace
from trappm.profiler.simulation.training_loop import DEFAULT_LOOP, Loop
from trappm.profiler.static_profile import step_profile, traced_phase
from trappm.profiler.tracing.tracer import StepOptions

SIZE, BATCH = 32, 8
COMPILED = StepOptions(is_compiled=True)
ARCHITECTURES = ["test_efficientnet", "test_vit", "test_convnext", "test_mambaout"]


def trace_of(model: str, phase: Phase = Phase.TRAIN, options: StepOptions = COMPILED) -> StepTrace:
    return traced_phase(model, SIZE if "vit" not in model else 160, phase, options)[0]


def kept_bytes(trace: StepTrace) -> float:
    """Return the bytes that are alive when the backward pass begins, without the images."""
    sizes = trace.sizes_at(BATCH)[: trace.end_of_forward]
    kinds = trace.kinds[: trace.end_of_forward]
    images = sizes[0]
    return float(sizes[kinds == Event.ALLOCATE].sum() - sizes[kinds == Event.FREE].sum() - images)


def kept_by_aot_autograd(name: str) -> float:
    """Return the bytes of what PyTorch's own partition of the joint graph keeps."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    storages: dict[int, int] = {}

    def forward(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        for node in output.args[0]:
            value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
            if isinstance(value, torch.Tensor) and node.op != "placeholder":
                storage = value.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        return graph

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: graph,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions={k: v for k, v in select_decomp_table().items() if "pool" not in str(k)},
    )
    torch._dynamo.reset()
    size = 160 if "vit" in name else SIZE
    model = torch.compile(create_model(name, size).train(), backend=backend)
    images, targets = torch.randn(BATCH, 3, size, size), torch.zeros(BATCH, dtype=torch.long)
    nn.functional.cross_entropy(model(images), targets).backward()
    return float(sum(storages.values()))


@pytest.mark.parametrize(
    "name",
    [*ARCHITECTURES[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES[2:])],
)
def test_the_forward_pass_keeps_what_aot_autograd_keeps(name):
    assert kept_bytes(trace_of(name)) == pytest.approx(kept_by_aot_autograd(name), rel=0.05)


@pytest.mark.parametrize("name", ARCHITECTURES[:2])
@pytest.mark.parametrize("phase", list(Phase))
def test_every_block_is_allocated_once_and_only_gradients_outlive_the_step(name, phase):
    trace = trace_of(name, phase)
    born, died = (trace.blocks[trace.kinds == k] for k in (Event.ALLOCATE, Event.FREE))
    assert born.tolist() == list(range(len(born)))
    assert len(set(died.tolist())) == len(died)
    left = set(born.tolist()) - set(died.tolist())
    assert left == {0, *trace.gradients.tolist()}  # the images, which come first, stay as well
    parameters = len(trace.parameter_bytes) if phase is Phase.TRAIN else 0
    assert len(trace.gradients) == parameters
    assert np.count_nonzero(trace.kinds == Event.END_OF_FORWARD) == 1


def test_a_compiled_step_takes_less_memory_than_the_eager_one():
    name = "test_efficientnet"
    eager, compiled = step_profile(name, SIZE), step_profile(name, SIZE, COMPILED)
    for phase in Phase:
        less, more = (p.memory(64, Optimizer.SGD, phase=phase).live_mib for p in (compiled, eager))
        assert less < more


class Dense(nn.Module):
    """A small model whose output is much larger than what it computes before."""

    def __init__(self, *, with_cache: bool = False) -> None:
        super().__init__()
        self.head, self.with_cache = nn.Conv2d(3, 64, 1), with_cache

    def forward(self, images):
        x = self.head(images)
        larger = nn.functional.interpolate(x, scale_factor=2.0)
        return (larger, x) if self.with_cache else larger


def mean_of(output, _):
    return (output[0] if isinstance(output, tuple) else output).mean()


@pytest.mark.parametrize("with_cache", [False, True])
def test_outputs_are_alive_until_the_forward_pass_ends(with_cache):
    model, pixels = Dense(with_cache=with_cache), BATCH * 64 * SIZE**2 * 4
    trace = traced_phase(model, SIZE, Phase.INFER, COMPILED)[0]
    assert kept_bytes(trace) == (4 + with_cache) * pixels
    live = simulate_memory(trace, BATCH, DEFAULT_LOOP).live_mib * 2**20
    assert live == pytest.approx(5 * pixels, rel=0.1)


def test_the_loss_is_not_compiled():
    """PyTorch's mean of a dense output needs it in memory, and gives a whole gradient."""
    options = StepOptions(is_compiled=True, loss=mean_of)
    pixels = BATCH * 64 * SIZE**2 * 4
    trace = traced_phase(Dense(), SIZE, Phase.TRAIN, options)[0]
    live = simulate_memory(trace, BATCH, DEFAULT_LOOP).live_mib * 2**20
    assert live > 4 * pixels


def test_a_long_chain_of_operators_is_traced():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, images):
            for _ in range(1100):
                images = images * self.weight
            return images.flatten(1)

    trace = traced_phase(Chain(), 4, Phase.TRAIN, COMPILED, (1, 2))[0]
    assert len(trace.gradients) == 1


def test_checkpointed_blocks_are_computed_again_one_after_the_other():
    class Blocks(nn.Module):
        def __init__(self, checkpoints):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv2d(8, 64, 1), nn.GELU(), nn.Conv2d(64, 8, 1))
                for _ in range(12)
            )
            self.stem, self.checkpoints = nn.Conv2d(3, 8, 1), checkpoints

        def forward(self, images):
            x = self.stem(images)
            for block in self.blocks:
                if self.checkpoints:
                    x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                else:
                    x = x + block(x)
            return x.mean((2, 3))

    plain, often = (
        simulate_memory(
            traced_phase(Blocks(checkpoints), SIZE, Phase.TRAIN, COMPILED)[0], BATCH, DEFAULT_LOOP
        ).live_mib
        for checkpoints in (False, True)
    )
    assert often < 0.6 * plain


def test_copies_of_weights_in_another_layout_are_kept_for_the_backward_pass():
    plain = StepOptions(is_compiled=True, memory_format=MemoryFormat.CHANNELS_LAST)
    copying = StepOptions(
        is_compiled=True, memory_format=MemoryFormat.CHANNELS_LAST, copies_weights=True
    )
    model = create_model("test_resnet", SIZE)
    weights = [p for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1 < p.shape[2]]
    images = BATCH * 3 * SIZE**2 * 4
    without, with_copies = (
        kept_bytes(trace_of("test_resnet", options=o)) for o in (plain, copying)
    )
    copied = sum(4 * p.numel() for p in weights[1:])  # the first has no data gradient
    assert with_copies - without == copied + images


def test_a_step_that_ends_at_once_can_be_replayed_at_any_batch_size():
    trace = trace_of("test_resnet")
    peaks = [simulate_memory(trace, n, DEFAULT_LOOP).live_mib for n in (1, 2, 64, 1000)]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == len(peaks)
    adding = Loop.PLAIN.with_optimizer(Optimizer.ADAM)
    assert simulate_memory(trace, 2, adding).live_mib > peaks[1]
