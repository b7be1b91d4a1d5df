"""Lightning callbacks that forecast and record a training run, and that set its batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.parsing import lightning_setattr

from trappm.extensions.integrations.forecast import (
    TrainingContext,
    TrainingMemory,
    fp32_of_process,
)
from trappm.extensions.integrations.training_watch import TrainingWatch, checked_name, say_batch
from trappm.prediction.fit import LEAST_RESERVE
from trappm.profiler.errors import InputError, one_line
from trappm.profiler.records import Phase, Precision

_PRECISIONS = {
    "16-mixed": Precision.AMP_FP16,
    "bf16-mixed": Precision.AMP_BF16,
    "bf16-true": Precision.BF16,
}


class TrappmCallback(lightning.Callback):
    """Callback that forecasts fit and epoch time before the first step, and times the steps.

    The forecast calls `forward` with the batch: a mapping is passed as keyword arguments, and of
    a list or tuple only the first entry is passed.

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
        self._watch = TrainingWatch("lightning", model_name, record_to, device)

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.is_global_zero:
            self._watch.look(
                lambda: _training_context(trainer, pl_module, batch, self._watch.model_name)
            )
            self._watch.begin()

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero:
            self._watch.end()

    def on_train_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self._watch.finish()


class LargestBatch(lightning.Callback):
    """Callback that sets the batch size to the largest one predicted to fit, before training.

    Lightning's `BatchSizeFinder` tries steps until the GPU runs out of memory; this tries none.
    Speed and convergence are not considered, so `most` limits the size. The module needs its
    `example_input_array`. If there is no prediction, as on a CPU, the batch size stays as it is,
    and one line gives the reason. A run that validates must have room for this, too. All processes
    of DDP take the size of the first one.

    Args:
        model_name: timm name, or a transformer such as `hf:gpt2` (default: the module is traced).
        device: GPU to choose for, such as `a100` (default: the device in use).
        attribute: Attribute that is set, of the module, its `hparams` and the data module.
        most: Largest batch size to set.
        reserve: Share of the device's memory to leave free.

    Raises:
        InputError, UnknownArchitectureError: Unknown model.
    """

    def __init__(
        self,
        model_name: str | None = None,
        device: str | None = None,
        attribute: str = "batch_size",
        most: int = 8192,
        reserve: float = LEAST_RESERVE,
    ) -> None:
        self._model_name = None if model_name is None else checked_name(model_name)
        self._device, self._attribute, self._most = device, attribute, most
        self._reserve = reserve

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        chosen: int | str = ""
        if trainer.is_global_zero:
            try:
                chosen = self._largest(trainer, pl_module)
            except Exception as error:  # an unknown module may raise anything
                chosen = one_line(error)
        chosen = trainer.strategy.broadcast(chosen)
        if isinstance(chosen, int):
            lightning_setattr(pl_module, self._attribute, min(chosen, self._most))
        if trainer.is_global_zero:
            say_batch(self._attribute, chosen, self._most)

    def _largest(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> int:
        example = module.example_input_array
        if example is None:
            raise InputError("the module has no example_input_array")
        strategy = type(trainer.strategy)
        if trainer.world_size > 1 and strategy is not DDPStrategy:  # others shard, as subclasses
            raise InputError(f"the memory of {strategy.__name__} is not predicted, only of DDP")
        if not trainer.fit_loop._data_source.is_module():
            raise InputError("the data loaders that were given to fit() have a size already")
        context = _training_context(trainer, module, example, self._model_name)
        if isinstance(example, tuple):  # Lightning passes all of them
            context = replace(context, args=example)
        phases = [Phase.TRAIN, Phase.INFER] if trainer.enable_validation else [Phase.TRAIN]
        return TrainingMemory(context, self._device).largest_batch(self._reserve, phases)


def _training_context(
    trainer: lightning.Trainer, module: lightning.LightningModule, batch: Any, name: str | None
) -> TrainingContext:
    precisions = {"32-true": fp32_of_process(), **_PRECISIONS}
    if trainer.precision not in precisions:
        raise InputError(
            f"unsupported precision {trainer.precision}; use one of: {', '.join(precisions)}"
        )
    if len(trainer.optimizers) != 1:
        raise InputError(f"{len(trainer.optimizers)} optimizers; only one optimizer is supported")
    batches = trainer.num_training_batches
    return TrainingContext(
        model=module,
        name=name,
        args=() if isinstance(batch, Mapping) else (_first_entry(batch),),
        kwargs=dict(batch) if isinstance(batch, Mapping) else {},
        optimizer=trainer.optimizers[0],
        precision=precisions[trainer.precision],
        accumulation_steps=trainer.accumulate_grad_batches,
        epoch_batches=int(batches) if batches != float("inf") else None,
        processes=trainer.world_size,
        device=module.device,
    )


def _first_entry(batch: Any) -> Any:
    return batch[0] if isinstance(batch, list | tuple) else batch
