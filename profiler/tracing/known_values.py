"""Values of tensors on the meta device, for steps that depend on them.

Hugging Face's models ask whether a mask hides anything, and whether positions count without a gap.
Such tensors are small and made of constants and of the caller's masks, so they are computed apart
from the trace, on the CPU. Tensors that depend on a weight, a random number or an image are
unknown. Where the operators of a step depend on those as well, such as with routed experts, the
step is run on the caller's values, and all tensors are computed.

A step that only reads such values, as to log a loss or to check a limit, is run once and then
traced: what Python read in the run answers the same reads of the trace, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.host.procfs import available_memory_mib
from trappm.profiler.models.model_input import ExampleInputs, Inputs
from trappm.profiler.tracing.tensors import tensors_of
from trappm.profiler.tracing.time_limit import check_time

USUAL = {"isnan": False, "isinf": False, "isneginf": False, "isposinf": False, "isfinite": True}
"""Results of functions that look for unusual numbers, for each element of a usual tensor."""
NO_UNUSUAL = "The step looks for infinite numbers and NaN; it is taken to find none."
AS_IN_THE_EXAMPLE = "The step looks at values; at all batch sizes they are those of the example."
ALL_BOXES = "Non-maximum suppression is taken to keep all boxes."
Number = bool | int | float


class HostRead(NamedTuple):
    """Values that Python read from a tensor of the GPU."""

    kind: str
    """Number, comparison or copy, and its type."""
    values: Number | Tensor | None


_UNIFORM = frozenset(("any", "all", "amax", "amin"))
"""Operators that are not element by element, but return the value of a uniform tensor."""
_COUNTS = frozenset(("sum", "count_nonzero"))
"""Operators that count, and so return 0 for a tensor of zeros."""
_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default)
MAX_ELEMENTS = 1 << 22
"""Largest tensor with known values: masks of a few thousand tokens by as many."""


class KnownValues:
    """Known values of tensors on the meta device, computed on the CPU.

    Args:
        everything: Compute all tensors, not only small ones of whole numbers.
        reads: Values that Python read from tensors when all were computed, in this order. They
            answer where values are unknown. Whole numbers do not, as they may grow with the batch.
    """

    def __init__(self, everything: bool = False, reads: Sequence[HostRead] = ()) -> None:
        self.everything = everything
        self._recorded = reads
        self.reads: list[HostRead] = []
        """Values that Python has read from tensors so far; None if they were unknown."""
        self._storages = WeakIdKeyDictionary()
        """Storages with values by storages on the meta device."""
        self._uniform = WeakIdKeyDictionary()
        """Value of all elements by storages on the meta device, where it is assumed."""
        self._host = WeakIdKeyDictionary()
        """Storages on the CPU that hold copies, and what was computed from them."""
        self.assumed: set[str] = set()
        """Remarks on assumed values that the step depended on, and on its copies to the CPU."""

    def set(self, tensor: Tensor, values: Tensor) -> None:
        """Set the values of a tensor, in its own layout."""
        storage = tensor.untyped_storage()
        same = values.stride() == tensor.stride() and values.dtype == tensor.dtype
        if same and values.untyped_storage().nbytes() == storage.nbytes():
            self._storages[storage] = values.untyped_storage()
            return
        self._storages[storage] = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        self._view(tensor).copy_(values)

    def get(self, tensor: Tensor) -> Tensor | None:
        """Return the values on the CPU, or None if they are unknown."""
        return self._view(tensor) if tensor.untyped_storage() in self._storages else None

    def read(self, tensor: Tensor) -> Number | None:
        """Return the value of a tensor with one element, or None if it is unknown."""
        kind, values = _number_of(tensor), self.get(tensor)
        if values is None and tensor.untyped_storage() in self._uniform:
            self.assumed.add(NO_UNUSUAL)
            number = self._read(kind, self._uniform[tensor.untyped_storage()])
        else:
            number = self._read(kind, None if values is None else values.item())
        return cast("Number | None", number)

    def compare(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | None:
        """Return what an operator that returns a truth value does; None if it is unknown."""
        with _disable_current_modes():
            result: bool | None = self.results(func, args, kwargs)
        return cast("bool | None", self._read(str(func), result))

    def copy_to_host(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Return what a copy to the CPU returns, or None if it is unknown."""
        if not (self.everything or self._recorded):
            return None
        with _disable_current_modes():
            known: Tensor | None = self.results(func, args, kwargs)
            kind, shape = f"copy of {args[0].dtype}", args[0].shape
            values = self._read(kind, None if known is None else known.clone())
            if known is not None or values is None:
                return None if known is None else self._on_host(known)
            if values.shape[1:] != shape[1:]:
                return None
            if values.shape != shape:  # the example's samples are repeated
                values = values[torch.arange(shape[0]) % len(values)]
            return self._on_host(values.clone())

    def host_result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator of tensors that were copied to the CPU, and of others
        there; NotImplemented for all other operators."""
        tensors = tensors_of((*args, *kwargs.values()))
        if any(t.is_meta for t in tensors) or kwargs.get("device") is not None:
            return NotImplemented
        if not any(t.untyped_storage() in self._host for t in tensors):
            return NotImplemented
        result = func(*args, **kwargs)
        for tensor in tensors_of((result,)):
            self._on_host(tensor)
        return result

    def _on_host(self, tensor: Tensor) -> Tensor:
        self._host[tensor.untyped_storage()] = True
        return tensor

    def _read(self, kind: str, values: Any) -> Any:
        """Note values that are read; unknown ones are those of the example, if there are any."""
        if values is None:
            values = self._next(kind)
            if values is not None:
                self.assumed.add(AS_IN_THE_EXAMPLE)
        self.reads.append(HostRead(kind, values))
        return values

    def check_reads(self) -> None:
        """Raise UnsupportedModelError unless the step read as often as on the example's values."""
        if self._recorded and len(self.reads) != len(self._recorded):
            raise UnsupportedModelError("it reads values, and not as often at every batch size")

    def knows(self, func: Any, tensors: Sequence[Tensor]) -> bool:
        """Return whether the number or truth value that an operator reads is known."""
        if all(not t.is_meta or self._has_value(t.untyped_storage()) for t in tensors):
            return True
        is_number = len(tensors) == 1
        return self._next(_number_of(tensors[0]) if is_number else str(func)) is not None

    def _has_value(self, storage: torch.UntypedStorage) -> bool:
        return storage in self._storages or storage in self._uniform

    def _next(self, kind: str) -> Any:
        """Return what was read in this place when all tensors were computed."""
        place = len(self.reads)
        read = self._recorded[place] if place < len(self._recorded) else None
        if read is None or read.kind != kind:
            return None
        values = read.values
        if isinstance(values, Tensor):
            return None if is_whole(values) and values.dtype != torch.bool else values
        return values if isinstance(values, (bool, float)) else None

    def assume(self, function: str, tensor: object, result: object) -> None:
        """Assume the usual result of a function in `USUAL` for a tensor of unknown values."""
        if not (isinstance(tensor, Tensor) and isinstance(result, Tensor) and result.is_meta):
            return
        with _disable_current_modes():  # to look at known values is no operator of the step
            if tensor.is_meta and self.get(tensor) is None:
                self._uniform[result.untyped_storage()] = USUAL[function]

    def forget(self, tensor: Tensor) -> None:
        """Forget the values of a tensor and of its views."""
        for known in (self._storages, self._uniform):
            known.pop(tensor.untyped_storage(), None)  # type: ignore[no-untyped-call]

    def _follow_uniform(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the value of all elements of a function's result, or None if it is unknown."""
        given = [t for t in tensors_of((*args, *kwargs.values())) if t.is_meta]
        if not given or not all(t.untyped_storage() in self._uniform for t in given):
            return None
        name = func._schema.name.removeprefix("aten::") if hasattr(func, "_schema") else ""
        is_count = name in _COUNTS and not any(self._uniform[t.untyped_storage()] for t in given)
        is_pointwise = torch.Tag.pointwise in getattr(func, "tags", ())
        if not (name in _UNIFORM or is_count or is_pointwise):
            return None

        def one_element(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not value.is_meta:
                return value.flatten()[:1].reshape((1,) * value.dim())
            usual = self._uniform[value.untyped_storage()]
            return torch.full((1,) * value.dim(), usual, dtype=value.dtype)

        result = func(*tree_map(one_element, tuple(args)), **tree_map(one_element, dict(kwargs)))
        return result.flatten()[0].item() if isinstance(result, Tensor) else None

    def _view(self, tensor: Tensor) -> Tensor:
        values = torch.empty(0, dtype=tensor.dtype)
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        return values.set_(self._storages[tensor.untyped_storage()], *layout)

    def results(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function of these arguments returns on the CPU; None if one is unknown."""
        unknown = False

        def values_of(value: Any) -> Any:
            nonlocal unknown
            if isinstance(value, torch.device) or (isinstance(value, str) and value == "meta"):
                return torch.device("cpu")
            if not isinstance(value, Tensor) or not value.is_meta:
                return value
            values = self.get(value)
            unknown = unknown or values is None
            return values

        given, named = tree_map(values_of, (tuple(args), dict(kwargs)))
        if unknown:
            return None
        if func in _SOFTMAX and given[2]:  # a CPU does not read 16 bits and write 32
            given = given[0].float(), given[1], False
        try:
            return func(*given, **named)
        except NotImplementedError:  # the operator, on the CPU
            return None
        except RuntimeError as error:
            if "not implemented for" in str(error):  # the type, on the CPU
                return None
            raise

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Compute the values of a function's results, if its arguments are known."""
        tensors = [t for t in tensors_of((out,)) if t.is_meta]
        if not self.everything:
            tensors = [t for t in tensors if is_whole(t)]
        if not tensors:
            return
        results = None
        if self.everything:
            check_memory(tensors)
            check_time()
            results = self.results(func, args, kwargs)
        elif sum(t.numel() for t in tensors) <= MAX_ELEMENTS and not _is_arbitrary(func):
            results = self.results(func, args, kwargs)
        if results is None:
            usual = self._follow_uniform(func, args, kwargs) if len(tensors) == 1 else None
            for tensor in tensors:
                if not getattr(func, "is_view", False):
                    self.forget(tensor)
                if usual is not None:
                    self._uniform[tensor.untyped_storage()] = usual
            return
        wanted = {id(tensor) for tensor in tensors}
        is_empty = "empty" in getattr(func, "__name__", "")
        for tensor, values in zip(tensors_of((out,)), tensors_of((results,)), strict=True):
            if is_empty:
                values.zero_()  # class numbers of a default loss, for instance
            # Views, and what is written in place, have their values already.
            if id(tensor) in wanted and tensor.untyped_storage() not in self._storages:
                self.set(tensor, values)

    def replace(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Compute the values of new tensors that have been made by other operators."""
        if self.everything:
            for tensor in tensors_of((out,)):
                self.forget(tensor)
            self.follow(func, args, kwargs, out)


def set_inputs(
    values: KnownValues, tensors: Sequence[Tensor], inputs: Inputs, batch_size: int
) -> None:
    """Set the values of the inputs, as far as a step may depend on them."""
    known = inputs.values(batch_size)
    if values.everything:
        known = cast(ExampleInputs, inputs).values(batch_size, floats=True)
    for tensor, value in zip(tensors, known, strict=True):
        if value is not None:
            values.set(tensor, value)


def set_weights(values: KnownValues, model: nn.Module, original: nn.Module) -> None:
    """Set the values of a copy's parameters, buffers and other tensors."""
    for tensor, real in zip(_tensors_of(model), _tensors_of(original), strict=True):
        if not real.is_meta and real.layout is torch.strided:
            check_memory([real])
            values.set(tensor, real.detach().to("cpu", tensor.dtype, copy=True))


def _tensors_of(module: nn.Module) -> list[Tensor]:
    others = (t for part in module.modules() for t in vars(part).values() if isinstance(t, Tensor))
    return [*module.parameters(), *module.buffers(), *others]


def check_memory(tensors: Sequence[Tensor]) -> None:
    """Raise UnsupportedModelError if this machine has no memory for twice these tensors."""
    needed_mib = 2 * sum(t.numel() * t.element_size() for t in tensors) / 2**20
    if needed_mib > 1 and needed_mib > available_memory_mib():
        raise UnsupportedModelError(
            "its operators depend on values, so it must run on the CPU, which has too little "
            "memory for it; give an example with fewer samples"
        )


def _number_of(tensor: Tensor) -> str:
    return f"number of {tensor.dtype}"


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is of integers or booleans."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _is_arbitrary(func: Any) -> bool:
    """Return whether an operator's result is random or uninitialized."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name
