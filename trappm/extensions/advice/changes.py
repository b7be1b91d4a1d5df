"""Changes of a training that the advice tries, with the lines of Python that make them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trappm.prediction.question import loop_of
from trappm.profiler.memory.simulation import Implementation, TrainingLoop
from trappm.profiler.models.known_names import is_prefixed
from trappm.profiler.models.sources import prefixed_source_of
from trappm.profiler.records import Execution, Optimizer, Precision

if TYPE_CHECKING:
    from trappm.prediction.models import Subject
    from trappm.prediction.prediction import Prediction

LORA_RANK = 16
"""Rank of LoRA adapters, a common one."""
_CLASSES = {
    Optimizer.SGD: "SGD(model.parameters(), lr=lr",
    Optimizer.MOMENTUM: "SGD(model.parameters(), lr=lr, momentum=0.9",
    Optimizer.ADAM: "Adam(model.parameters(), lr=lr",
    Optimizer.ADAMW: "AdamW(model.parameters(), lr=lr",
}


_AUTOCAST: Mapping[str, str] = {
    Precision.AMP_BF16: "torch.bfloat16",
    Precision.AMP_FP16: "torch.float16",
}


_CAST = (
    "from torch.utils._pytree import tree_map_only",
    "cast = lambda each: each.bfloat16() if each.is_floating_point() else each",
)
"""Lines for a cast of the floating-point tensors of a batch."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a training on the same card."""

    name: str
    """Such as `amp-bf16`; empty for the training as it is."""
    python: tuple[str, ...] = ()
    """Lines that make the change."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the question that differ."""
    model: str | None = None
    """Other name of the model."""
    subject: Subject | None = None
    """Other subject, with checkpoints."""
    is_same_training: bool = True
    """False if it changes the arithmetic, what is trained, or how."""
    blocks: tuple[str, ...] = ()
    """Blocks that are checkpointed."""
    remark: str | None = None
    """Sentence to print with the advice if the change is in it."""


AS_IT_IS = Change(name="")
"""No change, except for what accumulated gradients change."""
COMPILED = Change(
    name="torch.compile",
    python=("model = torch.compile(model)",),
    settings={"execution": Execution.COMPILE.value},
)


def loop_changes(step: Prediction) -> list[Change]:
    """Return the changes of the training loop: allocator and optimizer."""
    from trappm.prediction.answer import EIGHT_BITS_REMARK

    loop = step.loop or loop_of(step.optimizer)
    changes = []
    if not loop.expandable_segments:
        changes.append(
            Change(
                name="expandable segments",
                python=('os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"',),
                settings={"optimizer": replace(loop, expandable_segments=True)},
            )
        )
    if loop.groups or loop.optimizer is Optimizer.ADAMW_8BIT:
        return changes
    if loop.implementation is not Implementation.FUSED:
        changes.append(
            Change(
                name=f"fused {loop.optimizer}",
                python=_optimizer(loop.optimizer, ", fused=True"),
                settings={"optimizer": replace(loop, implementation=Implementation.FUSED)},
            )
        )
    if loop.optimizer.is_adam:
        changes.append(
            Change(
                name=Optimizer.ADAMW_8BIT.value,
                python=(
                    "from bitsandbytes.optim import AdamW8bit  # pip install bitsandbytes",
                    "optimizer = AdamW8bit(model.parameters(), lr=lr)",
                ),
                settings={"optimizer": _with_8_bits(loop)},
                is_same_training=False,
                remark=EIGHT_BITS_REMARK,
            )
        )
        changes.append(
            Change(
                name=f"momentum for {loop.optimizer}",
                python=_optimizer(Optimizer.MOMENTUM),
                settings={"optimizer": _with_momentum(loop)},
                is_same_training=False,
            )
        )
    return changes


def _optimizer(kind: Optimizer, more: str = "") -> tuple[str, ...]:
    return (f"optimizer = torch.optim.{_CLASSES[kind]}{more})",)


def _with_momentum(loop: TrainingLoop) -> TrainingLoop:
    return replace(loop, optimizer=Optimizer.MOMENTUM, weight_decay=False)


def _with_8_bits(loop: TrainingLoop) -> TrainingLoop:
    usual = Implementation.FOREACH  # others are of torch.optim only
    return replace(loop, optimizer=Optimizer.ADAMW_8BIT, implementation=usual, weight_decay=True)


def precision_changes(step: Prediction, able: Sequence[Precision]) -> list[Change]:
    """Return the precisions with fewer bits.

    Args:
        step: The step as it is.
        able: Precisions that the card can run, and in which it computes otherwise than now.
    """
    convolutions = "torch.backends.cudnn.allow_tf32 = True"
    products = 'torch.set_float32_matmul_precision("high")'
    is_strict = step.precision == Precision.FP32_STRICT
    lines = {
        Precision.FP32: (convolutions,),
        Precision.TF32: (convolutions, products) if is_strict else (products,),
        Precision.AMP_BF16: (),
        Precision.AMP_FP16: ("scaler = torch.amp.GradScaler()",),
        Precision.BF16: ("model = model.to(torch.bfloat16)",),
    }
    wanted = [Precision.BF16]
    if Precision(step.precision).types is Precision.FP32:
        amp = Precision.AMP_BF16 if Precision.AMP_BF16 in able else Precision.AMP_FP16
        wanted = [*[Precision.FP32] * is_strict, Precision.TF32, amp, Precision.BF16]
    return [
        Change(
            name=precision.value,
            python=lines[precision],
            settings={"precision": precision.value},
            is_same_training=False,
        )
        for precision in wanted
        if precision in able
    ]


def adapter_changes(model: str) -> list[Change]:
    """Return LoRA for a transformer by name that is trained as a whole, with 4 bits second.

    Raises:
        InputError: As `PrefixedSource.adapted`, such as without transformers.
    """
    if not is_prefixed(model):
        return []
    return [
        Change(name=each.option, python=each.python, model=each.name, is_same_training=False)
        for each in prefixed_source_of(model).adapted(model, LORA_RANK)
    ]


def larger_batch(batch_size: int, largest: int) -> Change:
    """Return the largest batch that fits, twice the batch size or a power of two times it.

    Args:
        batch_size: Batch size of the question, at most half of the largest.
        largest: Largest batch size that fits.
    """
    larger = batch_size << ((largest // batch_size).bit_length() - 1)
    return Change(
        name=f"batch {larger}",
        python=(f"loader = DataLoader(dataset, batch_size={larger})",),
        settings={"batch_size": larger},
        is_same_training=False,
    )


def checkpoint_change(blocks: Sequence[str], count: int, subject: Subject) -> Change:
    """Return the checkpointing of some of all blocks.

    Args:
        blocks: Paths of the blocks.
        count: Number of all blocks.
        subject: Model with these checkpoints.
    """
    names = textwrap.wrap(", ".join(map(repr, blocks)).replace("'", '"') + ",", width=74)
    return Change(
        name=f"checkpoint {len(blocks)}/{count} blocks",
        python=(
            "from functools import partial",
            "from torch.utils.checkpoint import checkpoint",
            "for name in (",
            *(f"    {line}" for line in names),
            "):",
            "    block = model.get_submodule(name)",
            "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        ),
        subject=subject,
        blocks=tuple(blocks),
    )


def is_of_loop(precision: str, before: str) -> bool:
    """Return whether a change of the precision is one of the training loop: autocast, or casts."""
    return precision != before and not Precision(precision).is_fp32


def training_loop(precision: str, batch_size: int, passes: int) -> tuple[str, ...]:
    """Return the lines of a training loop that accumulates the gradients of several passes."""
    is_scaled, half = precision == Precision.AMP_FP16, _AUTOCAST.get(precision)
    loss = f"loss = loss_of(model, batch){f' / {passes}' if passes > 1 else ''}"
    lines = [loss] if half is None else [f'with torch.autocast("cuda", {half}):', f"    {loss}"]
    if precision == Precision.BF16:
        lines.insert(0, "batch = tree_map_only(torch.Tensor, cast, batch)")
    lines.append("scaler.scale(loss).backward()" if is_scaled else "loss.backward()")
    update = ["scaler.step(optimizer)", "scaler.update()"] if is_scaled else ["optimizer.step()"]
    update.append("optimizer.zero_grad()")
    if passes > 1:
        update = [f"if number % {passes} == 0:", *(f"    {line}" for line in update)]
    return (
        *(_CAST if precision == Precision.BF16 else ()),
        f"loader = DataLoader(dataset, batch_size={batch_size})",
        "for number, batch in enumerate(loader, 1):",
        *(f"    {line}" for line in (*lines, *update)),
    )


def sharing(strategy: str, gpus: int, batch_size: int) -> tuple[str, ...]:
    """Return the lines that train on several GPUs, each with its part of the batch."""
    model = "model = DistributedDataParallel(model, device_ids=[local_rank])"
    if strategy == "fsdp":
        model = "fully_shard(model)  # after fully_shard(block) for each block"
    return (
        f"# torchrun --nproc-per-node {gpus} train.py, batch size {batch_size} per GPU",
        model,
    )
