"""Callback of transformers' `Trainer` that forecasts and records a run, and its batch sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trappm.extensions.integrations.forecast import (
    TrainingContext,
    TrainingMemory,
    fp32_of_process,
)
from trappm.extensions.integrations.training_watch import TrainingWatch, checked_name, say_batch
from trappm.prediction.fit import LEAST_RESERVE
from trappm.profiler.errors import InputError, one_line
from trappm.profiler.host.environment import independent_of_caller
from trappm.profiler.records import Phase, Precision

_ABOUT_LOSS = "num_items_in_batch"
"""Keyword argument added by the trainer; the step's memory does not depend on it."""


class TrappmCallback(TrainerCallback):
    """Callback that forecasts fit and epoch time before the first step, and times the steps.

    Args:
        model_name: timm name, or a transformer such as `hf:gpt2`; needed for times and labels.
        record_to: File to append a record to, for `trappm labels import`; needs `model_name`.
        device: GPU to forecast for, such as `a100` (default: the device in use).

    Raises:
        InputError, UnknownArchitectureError: Unknown model, or `record_to` without a name.
    """

    def __init__(
        self,
        model_name: str | None = None,
        record_to: str | Path | None = None,
        device: str | None = None,
    ) -> None:
        self._watch = TrainingWatch("transformers", model_name, record_to, device)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero:
            return
        model = kwargs["model"]

        def before_forward(
            _: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
        ) -> None:
            hook.remove()  # the first batch is enough
            given = {name: value for name, value in keywords.items() if name != _ABOUT_LOSS}
            self._watch.look(
                lambda: _training_context(self._watch.model_name, args, inputs, given, **kwargs)
            )

        hook = model.register_forward_pre_hook(before_forward, with_kwargs=True)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._watch.begin()

    def on_step_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._watch.end(args.gradient_accumulation_steps)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._watch.finish()


def set_largest_batch(
    trainer: Trainer,
    model_name: str | None = None,
    device: str | None = None,
    *,
    most: int = 8192,
    reserve: float = LEAST_RESERVE,
) -> None:
    """Set the batch size of a `Trainer`, before it trains, to the largest one predicted to fit.

    No callback can set it, because the trainer reads it before it calls any. Speed
    and convergence are not considered, so `most` limits the size. If the run evaluates, and the
    evaluation does not fit next to the training's state, its batch size is reduced. If there is no
    prediction, as on a CPU, the sizes stay as they are, and one line gives the reason. All
    processes of DDP take the sizes of the first one.

    Args:
        trainer: Trainer with a training data set.
        model_name: timm name, or a transformer such as `hf:gpt2` (default: the model is traced).
        device: GPU to choose for, such as `a100` (default: the device in use).
        most: Largest batch size to set.
        reserve: Share of the device's memory to leave free.

    Raises:
        InputError, UnknownArchitectureError: Unknown model.
    """
    name, args = None if model_name is None else checked_name(model_name), trainer.args
    phases = [Phase.TRAIN] if args.eval_strategy == "no" else [Phase.TRAIN, Phase.INFER]
    sizes: list[int | str] = [""] * len(phases)  # or the reason why one is unknown
    try:  # in all processes, which communicate where accelerate reads batches for all or seeds
        context = _context_before(trainer, name)
    except Exception as error:  # an unknown model may raise anything
        sizes = [one_line(error)] * len(phases)
    else:
        for place, phase in enumerate(phases if trainer.is_world_process_zero() else ()):
            try:
                sizes[place] = TrainingMemory(context, device).largest_batch(reserve, [phase])
            except Exception as error:
                sizes[place] = one_line(error)
    if args.world_size > 1:
        broadcast_object_list(sizes)
    largest = sizes[0]
    if isinstance(largest, int):
        args.per_device_train_batch_size = min(largest, most)
        trainer._train_batch_size = args.train_batch_size  # as in the search of hyperparameters
    if trainer.is_world_process_zero():
        say_batch("per_device_train_batch_size", largest, most)
    for evaluated in sizes[1:]:
        given = args.per_device_eval_batch_size
        if isinstance(evaluated, int):
            args.per_device_eval_batch_size = min(evaluated, given)
        if trainer.is_world_process_zero() and (isinstance(evaluated, str) or evaluated < given):
            say_batch("per_device_eval_batch_size", evaluated, given)


@independent_of_caller
def _context_before(trainer: Trainer, name: str | None) -> TrainingContext:
    """Return the context of a run that has not begun; raises InputError if it is not covered."""
    args, model = trainer.args, trainer.model
    assert isinstance(model, torch.nn.Module)  # noqa: S101  (every trainer has one)
    if args.n_gpu > 1:
        raise InputError(f"DataParallel on {args.n_gpu} GPUs is not predicted; launch by torchrun")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise InputError("the memory of FSDP and DeepSpeed is not predicted, only of DDP")
    optimizer = trainer.optimizer
    if optimizer is None:
        kind, settings = trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = kind(model.parameters(), **settings)
    loader = trainer.get_train_dataloader()
    return _training_context(
        name,
        args,
        (),
        dict(next(iter(loader))),
        model=model,
        optimizer=optimizer,
        train_dataloader=loader,
    )


def _training_context(
    name: str | None,
    args: TrainingArguments,
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
    *,
    model: torch.nn.Module,
    optimizer: Any,
    train_dataloader: Any,
    **_: Any,
) -> TrainingContext:
    precision = fp32_of_process()
    if args.bf16 or args.fp16:
        precision = Precision.AMP_BF16 if args.bf16 else Precision.AMP_FP16
    elif next(model.parameters()).dtype is torch.bfloat16:
        precision = Precision.BF16
    try:
        batches = len(train_dataloader)
    except TypeError:  # a data set without a length
        batches = None
    return TrainingContext(
        model=model,
        name=name,
        args=inputs,
        kwargs=keywords,
        optimizer=getattr(optimizer, "optimizer", optimizer),  # without accelerate's wrapper
        precision=precision,
        accumulation_steps=args.gradient_accumulation_steps,
        epoch_batches=batches,
        processes=args.world_size,
        frees_gradients=True,
        device=args.device,
        will_compile=bool(args.torch_compile),
    )
