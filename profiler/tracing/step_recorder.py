"""Records a step on the meta device: one stream of operators, from which logs make records.

    operators as PyTorch runs them --> allocations and kernels (`allocation_log`, `kernel_log`)
                                   --> nodes of the graph of the forward pass (`graphs.graph_log`)

Composite operators (linear layers, attention) come before they are taken apart (`composites`): the
graph has the composite ones, allocations and kernels have their parts. Where the meta device
differs from a GPU, the recorder imitates the GPU (`gpu`): fused attention and dropout, cuDNN's
layouts, in-place accumulation of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from trappm.profiler.errors import InputError
from trappm.profiler.graphs.graph_log import GraphLog
from trappm.profiler.graphs.nodes import bound
from trappm.profiler.traced_step import Pass
from trappm.profiler.tracing.allocation_log import AllocationLog
from trappm.profiler.tracing.composites import decompose, is_composite
from trappm.profiler.tracing.gpu import torchvision_operators
from trappm.profiler.tracing.gpu.operators import COPYING, RESULTS, result_of
from trappm.profiler.tracing.gpu_functions import GpuFunctions
from trappm.profiler.tracing.kernel_log import FACTORS, KernelLog
from trappm.profiler.tracing.known_values import ALL_BOXES, KnownValues, is_whole
from trappm.profiler.tracing.tensors import channels_last, in_backward, tensors_of

_ATEN = torch.ops.aten
_FACTORS = {**FACTORS, "convolution": ("input", "weight")}
"""Factors of products and convolutions."""
_COMPARISONS = (_ATEN.equal.default, _ATEN.allclose.default)
"""Operators that return a truth value."""

NO_TRANSFERS = "The step copies tensors to the CPU; the time does not include these copies."
MIN_TRANSFER_BYTES = 1 << 20
"""Smallest copy to the CPU that is worth a remark: 0.1 ms over PCIe."""


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs every operator and calls the logs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: wrapping for torch.compile would take a tenth of the time."""
        return False

    def __init__(
        self,
        allocations: AllocationLog,
        kernels: KernelLog,
        functions: GpuFunctions,
        graph: GraphLog | None = None,
        values: KnownValues | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocations = allocations
        self._kernels = kernels
        self._functions = functions
        self._graph = graph
        self._values = values or KnownValues()
        self.failed: Any = None
        """The first operator that raised, the innermost one."""
        self.refusal: str | None = None
        """Why there is a graph only: an operator of a file has no form in PyTorch."""
        self._inside: Any = None
        """Operator whose result is made by others."""
        self._from_outside: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors with values by storage, and as many bytes on the meta device."""
        self._last = _references_to_the_last()

    def end_model(self) -> None:
        self._graph = None
        self._kernels.begin_loss()

    def end_forward(self) -> None:
        self._kernels.forward_ended = True
        self._functions.end_forward()
        self._allocations.end_forward()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            # Without this, each shape that is read here goes through the mode of `functions`.
            with torch._C.DisableTorchFunction():
                try:
                    return self._dispatch(func, args, kwargs or {})
                except RuntimeError as error:
                    if "not on the expected device" not in str(error):
                        raise
                    return self._dispatch(func, *tree_map(self._on_meta, (args, kwargs or {})))
        except Exception:
            self.failed = self.failed or func
            raise

    def _on_meta(self, value: Any) -> Any:
        """Return a tensor from outside the model, such as labels of a closure, without values."""
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        storage = value.untyped_storage()
        if storage._cdata not in self._from_outside:
            whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            operator, self._allocations.operator = self._allocations.operator, None  # an input
            self._allocations.see(whole)
            self._allocations.operator = operator
            self._from_outside[storage._cdata] = value, whole
        _, whole = self._from_outside[storage._cdata]
        tensor = torch.empty(0, dtype=value.dtype, device="meta")
        tensor.set_(whole.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        if self._values.everything or is_whole(value):
            self._values.set(tensor, value.detach().cpu().clone())
        return tensor

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, and add it to the graph if there is one."""
        graph = self._graph
        if graph is None:
            return self._run(func, args, kwargs)
        tensors = tensors_of((*args, *kwargs.values()))
        rule = graph.rule(func, args, tensors)
        if rule is None and is_composite(func):  # its parts are nodes
            return self._composite(func, args, kwargs)
        self._graph = None
        try:
            result = self._run(func, args, kwargs)
        finally:
            self._graph = graph
        graph.note(rule, func, args, kwargs, tensors, result)
        return result

    def run_whole(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a composite operator above autograd, and add it to the graph if it is one node."""
        graph = self._graph
        if graph is None:
            return self._replace_or_decompose(func, args, kwargs)
        tensors = tensors_of((*args, *kwargs.values()))
        rule = graph.rule(func, args, tensors)
        if rule is None:  # its parts are nodes
            return self._replace_or_decompose(func, args, kwargs)
        self._graph = None
        try:
            result = self._replace_or_decompose(func, args, kwargs)
        finally:
            self._graph = graph
        graph.note(rule, func, args, kwargs, tensors, result)
        return result

    def _replace_or_decompose(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = self._functions.whole(func, args, kwargs)
        if result is NotImplemented:
            return decompose(func, args, kwargs)
        with _disable_current_modes(), torch.no_grad():
            self._values.replace(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the operator's result on a GPU; log its allocations and kernels."""
        if func is _ATEN.add.Tensor and in_backward() and _accumulates(args, self._last):
            # The engine adds gradients in place, but not while a dispatch mode is watching.
            self._kernels.add_accumulation(args[0], args[1])
            self._values.forget(args[0])
            return args[0]
        if (read := self._read(func, args, kwargs)) is not None:
            return read
        if self._values.everything and self._is_of_cpu(func, args, kwargs):
            return self._values.results(func, args, kwargs)
        if (result := self._values.host_result(func, args, kwargs)) is not NotImplemented:
            return result
        if is_composite(func):
            return self._composite(func, args, kwargs)
        self._allocations.operator = self._inside or func
        if func.is_view:
            output = func(*args, **kwargs)
            self._note_results(func, args, kwargs, output)
            return output
        call = bound(func, args, kwargs)
        self.refusal = self.refusal or call.get("refusal")
        self._check(func, call)
        if func is _ATEN.convolution.default:
            return self._convolution(func, args, call)
        if func is _ATEN.convolution_backward.default:
            return self._convolution_backward(func, args, call)
        if func is _ATEN.index.Tensor and self._values.everything:
            args = args[0], self._places(args[1])
        if func in RESULTS:
            output = RESULTS[func](call)
        elif func in COPYING or func.namespace == "torchvision":
            self._inside = func
            with self:  # so that what it makes is seen
                output = COPYING[func](call) if func in COPYING else self._torchvision(func, args)
            self._inside = None
            self._allocations.operator = func
        else:
            output = self._result(func, args, kwargs)
        self._note_results(func, args, kwargs, output)
        self._kernels.operator(func, call, output)
        return output

    def _read(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator copies from the GPU to the CPU, or None if it is unknown."""
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            return self._values.read(args[0])
        if func in _COMPARISONS:
            return self._values.compare(func, args, kwargs)
        if func is _ATEN._to_copy.default and _to_host(args[0], kwargs):
            if args[0].nbytes >= MIN_TRANSFER_BYTES:
                self._values.assumed.add(NO_TRANSFERS)
            return self._values.copy_to_host(func, args, kwargs)
        return None

    def _check(self, func: Any, call: Mapping[str, Any]) -> None:
        """Raise InputError for arguments that a GPU refuses and the meta device does not."""
        name = func._schema.name.removeprefix("aten::")
        if factors := _FACTORS.get(name):
            kinds = {call[x].dtype for x in factors}
            if torch.float64 in kinds and len(kinds) > 1:  # which autocast does not cast either
                raise InputError(
                    f"{name} multiplies float64 by another data type; give float32 inputs"
                )
        if name in ("embedding", "_embedding_bag") and call["sparse"] and torch.is_grad_enabled():
            raise ValueError("has sparse=True, so its gradient is sparse, which is not simulated")
        if name == "embedding":
            self._check_range(call["indices"], call["weight"].shape[0], "rows of an embedding")
        elif name in ("nll_loss_forward", "nll_loss2d_forward"):
            classes = call["self"].shape[0 if call["self"].dim() == 1 else 1]
            self._check_range(call["target"], classes, "classes", call["ignore_index"])

    def _check_range(self, tensor: Tensor, size: int, what: str, ignored: int = 0) -> None:
        """Raise InputError if known numbers are not from 0 to below `size`, or ignored."""
        numbers = self._values.get(tensor)
        if numbers is None:
            return
        wrong = numbers[((numbers < 0) | (numbers >= size)) & (numbers != ignored)]
        if len(wrong):
            raise InputError(
                f"index {int(wrong[0])} is out of range of {size} {what}; give an example with "
                f"indices from 0 to {size - 1}, such as torch.zeros"
            )

    def _is_of_cpu(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator is of tensors on the CPU only."""
        tensors = tensors_of((*args, *kwargs.values()))
        has_device = kwargs.get("device") is not None
        return bool(tensors) and not has_device and not any(t.is_meta for t in tensors)

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return indices with the places of masks, which a GPU computes first."""
        places: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
                continue
            with self:
                places += torch.ops.aten.nonzero(index).unbind(1)
        return places

    def _composite(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a composite operator in inference mode, which reaches the recorder whole."""
        with self:
            whole = self._functions.whole(func, args, kwargs)
            if whole is NotImplemented:
                return decompose(func, tuple(args), dict(kwargs))
        self._values.replace(func, args, kwargs, whole)
        return whole

    def _result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator, which may depend on values."""
        try:
            result = result_of(func, args, kwargs)
            if isinstance(result, Tensor) and self._is_misplaced(result, args, kwargs):
                return result_of(func, *tree_map(self._on_meta, (args, kwargs)))
            return result
        except RuntimeError:  # values of meta tensors are unknown; includes NotImplementedError
            if not self._values.everything or func.namespace == "quantized":
                raise
            results = self._values.results(func, args, kwargs)
            if results is None:
                raise
        if func is _ATEN._pack_padded_sequence.default:
            return results[0].to("meta"), results[1]  # the batch sizes are always on the CPU
        return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, results)

    def _torchvision(self, func: Any, args: Sequence[Any]) -> Any:
        """Return the result of an operator of torchvision."""
        name = func._schema.name.removeprefix("torchvision::")
        kept = None
        if name == "nms":
            with _disable_current_modes():
                places = self._values.results(func, args, {})
            kept = None if places is None else len(places)
            if kept is None:
                self._values.assumed.add(ALL_BOXES)
        return torchvision_operators.result(name, args, kept)

    def _is_misplaced(self, result: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a result is on the CPU because an argument is from outside the model.

        The device of a product is that of its first factor, such as an adjacency matrix.
        """
        on_cpu = not result.is_meta and "device" not in kwargs
        return on_cpu and any(tensor.is_meta for tensor in tensors_of(args))

    def _note_results(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        for tensor in tensors_of((output,)):
            if tensor.is_meta or not (self._values.everything or func.is_view):
                self._allocations.see(tensor)
        if self._inside is None:
            self._values.follow(func, args, kwargs, output)

    def _convolution(self, func: Any, args: Sequence[Any], call: Mapping[str, Any]) -> Tensor:
        images, weight = call["input"], call["weight"]
        layout = _layout(images, weight)
        images = self._as_read(images, layout)
        output = _restore_layout(result_of(func, args, {}), layout)
        self._allocations.see(output)
        self._allocations.workspace(Pass.FORWARD, images, weight, output, call["groups"])
        self._kernels.convolution(call, images, output)
        self._values.follow(func, args, {}, output)
        return output

    def _convolution_backward(
        self, func: Any, args: Sequence[Any], call: Mapping[str, Any]
    ) -> tuple[Tensor | None, ...]:
        images, weight, groups = call["input"], call["weight"], call["groups"]
        layout = _layout(images, weight)
        gradient = self._as_read(call["grad_output"], layout)
        gradients = list(result_of(func, args, {}))
        if gradients[0] is not None:
            gradients[0] = _restore_layout(gradients[0], layout)
        for which, result in zip(
            (Pass.DATA_GRADIENT, Pass.WEIGHT_GRADIENT), gradients, strict=False
        ):
            if result is not None:
                self._allocations.see(result)
                self._allocations.workspace(which, images, weight, gradient, groups)
        if gradients[2] is not None:
            self._allocations.see(gradients[2])
        self._kernels.convolution_backward(call, gradient, gradients)
        return tuple(gradients)

    def _as_read(self, images: Tensor, layout: torch.memory_format) -> Tensor:
        """Return the images as cuDNN reads them: copied if they have another layout."""
        if images.dim() != 4 or images.is_contiguous(memory_format=layout):
            return images
        with self:
            return images.contiguous(memory_format=layout)


def _to_host(tensor: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a tensor of the GPU is copied to the CPU."""
    device = kwargs.get("device")
    return tensor.is_meta and device is not None and device.type == "cpu"


def _layout(images: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the layout of a convolution on a GPU: channels-last if its images or weights are."""
    last = channels_last(images) or channels_last(weight)
    return torch.channels_last if last else torch.contiguous_format


def _restore_layout(result: Tensor, layout: torch.memory_format) -> Tensor:
    """Return a convolution's result in its layout; the meta device considers the weights only.

    But windows of one pixel have both layouts, and computed weights (standardized ones) are
    contiguous.
    """
    if result.dim() != 4 or result.is_contiguous(memory_format=layout):
        return result
    return torch.empty_like(result, memory_format=layout)


def _accumulates(args: Sequence[Any], last: tuple[int, int]) -> bool:
    """Return whether the autograd engine would add these two gradients in place.

    `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp: the buffer is dense and holds
    the last reference to the first gradient.
    """
    first, second = args[0], args[1]
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    if first.requires_grad:  # not a gradient, but a sum that is computed again
        return False
    alike = first.shape == second.shape and first.dtype == second.dtype
    dense = _ATEN.is_non_overlapping_and_dense.default(first)
    return alike and dense and _references(first) == last


def _references(tensor: Tensor) -> tuple[int, int]:
    """Return the number of references to the tensor and to its storage."""
    storage = tensor.untyped_storage()._cdata
    return tensor._use_count(), torch._C._storage_Use_Count(storage)  # type: ignore[attr-defined]


@cache
def _references_to_the_last() -> tuple[int, int]:
    """Return `_references` in a dispatch mode for a gradient that only the engine holds."""
    seen: list[tuple[int, int]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is _ATEN.add.Tensor:
                seen.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty(1, device="meta", requires_grad=True)
        both = leaf * 2 + leaf * 3
        with Watch():  # type: ignore[no-untyped-call]
            both.backward()  # type: ignore[no-untyped-call]
    return seen[0]
