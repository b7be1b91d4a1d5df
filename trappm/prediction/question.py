"""A question about a step, apart from its model and device, checked without torch.

Its training loop is an optimizer by name, by class, or as the object of `torch.optim`. An object is
read by its groups: which parameters of the module each one holds, and how it treats them.
Parameters are the same if they are the same tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from trappm.prediction.cost import MAX_USD_PER_HOUR
from trappm.prediction.models import check_size
from trappm.profiler.errors import InputError
from trappm.profiler.memory.simulation import (
    Implementation,
    LoopPreset,
    ParameterGroup,
    TrainingLoop,
)
from trappm.profiler.records import (
    MIN_8BIT_COUNT,
    Execution,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    StepSettings,
    member,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trappm.prediction.models import Subject

MAX_COUNT = 10**12
"""Maximum of epochs, and of samples per epoch."""
MAX_CARBON_G_PER_KWH = 10_000
MAX_LIMIT_W = 10_000


class QuestionSettings(TypedDict, total=False):
    """Settings of a question, which are arguments of `trappm.predict` and `trappm.compare`."""

    batch_size: int | None
    phase: str
    precision: str | None
    memory_format: str | None
    optimizer: str | type | torch.optim.Optimizer | TrainingLoop | None
    accumulation: int | None
    snapshot: str | Path | None
    epochs: int | None
    samples: int | None
    carbon_g_per_kwh: float | None
    power_limit_w: float | None
    usd_per_hour: float | None


class Question:
    """Settings of a step, snapshot and length of a run, as they were asked.

    `Selection` has what the question leaves open.
    """

    def __init__(
        self, *, execution: str = Execution.EAGER, **settings: Unpack[QuestionSettings]
    ) -> None:
        """Check the settings, which are those of `trappm.predict`; raises InputError."""
        for name in settings.keys() - QuestionSettings.__annotations__.keys():
            raise TypeError(f"a question has no setting {name!r}")
        self.batch_size = settings.get("batch_size")
        check_size("batch size", self.batch_size)
        self.phase = Phase(member("phase", Phase, settings.get("phase", Phase.TRAIN)))
        self.given: dict[str, Any] = {}
        """Settings that the question names."""
        if (precision := settings.get("precision")) is not None:
            self.given["precision"] = member("precision", Precision, precision)
        if (memory_format := settings.get("memory_format")) is not None:
            self.given["memory_format"] = member("memory_format", MemoryFormat, memory_format)
        self.execution = member("execution", Execution, execution)
        loop, optimizer = None, settings.get("optimizer")
        if optimizer is not None:
            loop = loop_of(optimizer)
            self.given["optimizer"] = loop.optimizer
        self.optimizer: Optimizer | None = self.given.get("optimizer")
        self.accumulation = 1 if loop is None else loop.accumulation_steps
        """Forward and backward passes per optimizer step."""
        accumulation = settings.get("accumulation")
        if accumulation is not None:
            check_size("accumulation", accumulation)
            self.accumulation = accumulation
            loop = loop and replace(loop, accumulation_steps=accumulation)
        if self.phase is Phase.INFER:
            if accumulation is not None and accumulation > 1:
                raise InputError(
                    f"accumulation is {accumulation}, which is of training; leave it out with "
                    "phase infer"
                )
            self.accumulation = 1
        self._loop = None if isinstance(optimizer, str) and self.accumulation == 1 else loop
        self._optimizer: Any = optimizer if hasattr(optimizer, "param_groups") else None
        self.snapshot = settings.get("snapshot")
        if self.snapshot is not None and not isinstance(self.snapshot, str | Path):
            raise InputError(f"snapshot is {self.snapshot!r}; give an id, an alias or a folder")
        self.epochs, self.samples = settings.get("epochs"), settings.get("samples")
        self.carbon_g_per_kwh = settings.get("carbon_g_per_kwh")
        self.power_limit_w = settings.get("power_limit_w")
        self.usd_per_hour = settings.get("usd_per_hour")
        _check_amount("power limit", "watts", self.power_limit_w, MAX_LIMIT_W)
        _check_amount("price", "USD per hour", self.usd_per_hour, MAX_USD_PER_HOUR)
        _check_run(epochs=self.epochs, samples=self.samples, carbon_g_per_kwh=self.carbon_g_per_kwh)
        plain = {name: value for name, value in settings.items() if name != "optimizer"}
        self.identity = (
            sorted((name, str(value)) for name, value in plain.items() if value is not None),
            str(self.execution), self.accumulation, self.optimizer, self._loop,
            self._optimizer is not None,
        )  # fmt: skip
        """Equal for equal questions; by `repr`, too."""

    def loop_for(
        self, subject: Subject, settings: StepSettings
    ) -> tuple[TrainingLoop | None, str | None]:
        """Return the training loop of a model, and a remark on what its optimizer leaves out.

        The loop is None if it is the usual one of its optimizer. An optimizer of a module's
        parameters is read by its groups.

        Args:
            subject: The model.
            settings: Settings that answer the question; their optimizer is that of the loop unless
                the question has one.
        """
        loop = self._loop
        if loop is None and self.accumulation > 1:
            loop = loop_of(settings.optimizer)
            loop = replace(loop, accumulation_steps=self.accumulation)
        if loop is None or self._optimizer is None or self.phase is Phase.INFER:
            return loop, None
        if subject.module is None:
            return loop, f"The optimizer is taken to hold all parameters of {subject.name}."
        return loop_of_module(loop, self._optimizer, subject.module)

    def given_settings(self) -> StepSettings:
        """Return the settings that the question names, the rest plain: fp32, contiguous, SGD."""
        return StepSettings(**self.given, execution=self.execution)


def _check_amount(name: str, unit: str, value: object, most: int) -> None:
    """Raise InputError if a value is neither None nor a number above 0, at most `most`."""
    if value is not None and not (type(value) in {int, float} and 0 < value <= most):  # type: ignore[operator]
        raise InputError(
            f"the {name} is {value!r}; it must be a number of {unit} above 0, at most {most:,}"
        )


def _check_run(*, epochs: object, samples: object, carbon_g_per_kwh: object) -> None:
    """Raise InputError if only half of a run is given, or a number is out of range."""
    if (epochs is None) != (samples is None):
        raise InputError("a whole run needs both epochs and samples (of one epoch)")
    for name, value in (("epochs", epochs), ("samples", samples)):
        if value is not None and not (type(value) is int and 1 <= value <= MAX_COUNT):
            raise InputError(
                f"{name} is {value!r}; it must be a whole number from 1 to {MAX_COUNT:,}"
            )
    carbon = carbon_g_per_kwh
    if carbon is not None and not (
        isinstance(carbon, int | float) and 0 <= carbon <= MAX_CARBON_G_PER_KWH
    ):
        raise InputError(
            f"carbon intensity is {carbon!r} g/kWh; it must be 0 to {MAX_CARBON_G_PER_KWH:,}"
        )


def loop_of(
    optimizer: str | torch.optim.Optimizer | type | TrainingLoop | object,
) -> TrainingLoop:
    """Return the training loop of an optimizer, as PyTorch runs it by default.

    The loop has the kind of most parameters of an object, and no groups (see `loop_of_module`).

    Args:
        optimizer: A name in any case, a class or an object of `torch.optim` or of `AdamW8bit` of
            bitsandbytes, or the loop itself.

    Raises:
        InputError: The optimizer is unknown.
    """
    if isinstance(optimizer, TrainingLoop):
        return optimizer
    if isinstance(optimizer, str):
        if optimizer.lower() not in list(Optimizer):
            raise _unknown(repr(optimizer))
        kind = Optimizer(optimizer.lower())
    elif isinstance(optimizer, type):
        kind = _kind_of(optimizer)
    else:
        groups = [(_group_of(optimizer, group), group["params"]) for group in _groups(optimizer)]
        most, _ = max(groups, key=lambda pair: sum(p.numel() for p in pair[1]))
        return _with_kind(TrainingLoop(), most)
    return LoopPreset.PLAIN.with_optimizer(kind)


def loop_of_module(
    loop: TrainingLoop, optimizer: torch.optim.Optimizer, module: nn.Module
) -> tuple[TrainingLoop, str | None]:
    """Return a loop with the groups of an optimizer of this module, and a remark on what is left.

    An optimizer with one group of all trainable parameters has a loop without groups. So has one of
    another module's parameters, which is taken as the kind of optimizer.

    Args:
        loop: Training loop of the optimizer (`loop_of`).
        optimizer: Object of `torch.optim`.
        module: Module that is trained.
    """
    parameters = list(module.parameters())
    place_of = {id(parameter): place for place, parameter in enumerate(parameters)}
    groups = [
        replace(
            _group_of(optimizer, group),
            places=tuple(place_of[id(p)] for p in group["params"] if id(p) in place_of),
        )
        for group in _groups(optimizer)
    ]
    held = {place for group in groups for place in group.places or ()}
    if not held:
        return loop, (
            f"The optimizer holds no parameter of this {type(module).__name__}; it is taken to "
            "hold all of them."
        )
    other_count = sum(
        id(p) not in place_of for group in _groups(optimizer) for p in group["params"]
    )
    trained = {place for place, parameter in enumerate(parameters) if parameter.requires_grad}
    is_usual = len(groups) == 1 and held >= trained
    own = loop if is_usual else replace(loop, groups=tuple(groups))
    remarks = []
    if other_count:
        remarks.append(
            f"The optimizer holds {other_count} more parameters, which are not of this "
            f"{type(module).__name__} and not counted."
        )
    count, all_count = (
        sum(parameters[place].numel() for place in places) for places in (trained - held, trained)
    )
    if count:
        remarks.append(
            f"The optimizer leaves out {count:,} of {all_count:,} trainable parameters; these have "
            "gradients, but neither state nor update."
        )
    return own, " ".join(remarks) or None


def _groups(optimizer: object) -> Sequence[Mapping[str, Any]]:
    """Return the groups of an object of `torch.optim`; raises InputError for another one."""
    _kind_of(type(optimizer))
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups  # type: ignore[attr-defined]
    return groups


def _kind_of(kind: type) -> Optimizer:
    """Return the optimizer of a known class; another class may keep anything."""
    import torch

    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if name == _ADAMW_8BIT:
        return Optimizer.ADAMW_8BIT
    known: dict[type, Optimizer] = {
        torch.optim.SGD: Optimizer.SGD,
        torch.optim.Adam: Optimizer.ADAM,
        torch.optim.AdamW: Optimizer.ADAMW,
    }
    if kind not in known:
        raise _unknown(name)
    return known[kind]


_ADAMW_8BIT = "bitsandbytes.optim.adamw.AdamW8bit"


def _unknown(given: str) -> InputError:
    return InputError(
        f"optimizer is {given}; known are {', '.join(Optimizer)}, SGD, Adam and AdamW of "
        "torch.optim, and AdamW8bit of bitsandbytes; for another one, name the one that keeps as "
        "much per parameter: sgd (nothing), momentum (one tensor), adam (two) or adamw-8bit (two "
        "in 8 bits)"
    )


def _group_of(optimizer: object, group: Mapping[str, Any]) -> ParameterGroup:
    """Return how an optimizer treats a group; raises InputError if this is not simulated."""
    if group.get("amsgrad"):
        raise InputError(
            f"{type(optimizer).__name__} has amsgrad=True, which keeps a third tensor per "
            "parameter; it is not simulated: leave amsgrad out, and add one size of the parameters"
        )
    kind = _kind_of(type(optimizer))
    if kind is Optimizer.ADAMW_8BIT:
        arguments = getattr(optimizer, "args", None)  # bitsandbytes keeps them there
        min_8bit_size = getattr(arguments, "min_8bit_size", MIN_8BIT_COUNT)
        if getattr(optimizer, "is_paged", False) or min_8bit_size != MIN_8BIT_COUNT:
            raise InputError(
                f"AdamW8bit with paged states or {min_8bit_size=} is not simulated; leave "
                "is_paged and min_8bit_size out"
            )
    if kind is Optimizer.SGD and group["momentum"]:
        kind = Optimizer.MOMENTUM
    implementation = Implementation.FOREACH
    if group.get("fused"):
        implementation = Implementation.FUSED
    elif group.get("foreach") is False:
        implementation = Implementation.PLAIN
    return ParameterGroup(
        optimizer=kind, implementation=implementation, weight_decay=group["weight_decay"] > 0
    )


def _with_kind(loop: TrainingLoop, group: ParameterGroup) -> TrainingLoop:
    return replace(
        loop,
        optimizer=group.optimizer,
        implementation=group.implementation,
        weight_decay=group.weight_decay,
    )
