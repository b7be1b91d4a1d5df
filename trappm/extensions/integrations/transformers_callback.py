"""Callback of transformers' `Trainer` that forecasts a run and records its step times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trappm.extensions.integrations.forecast import TrainingContext, fp32_of_process
from trappm.extensions.integrations.training_watch import TrainingWatch
from trappm.profiler.records import Precision

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
        device=args.device,
        will_compile=bool(args.torch_compile),
    )
