"""Traces a model's steps on the meta device: without memory, weights or arithmetic.

    model + inputs --inference step at two batch sizes--> graph, allocations, kernels
                   --training step at the same two------> allocations, kernels

Sizes are affine in the batch size, so two batch sizes give all. A third is checked where they seem
not to be, and for modules of the caller.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trappm.profiler.errors import (
    BatchOrderError,
    InputError,
    TrappmError,
    UnevenSizesError,
    UnsupportedModelError,
    one_line,
)
from trappm.profiler.graphs.graph_log import GraphLog, needs_values
from trappm.profiler.models.model_input import TARGETS, ExampleInputs, Inputs
from trappm.profiler.records import (
    Graph,
    GraphTemplate,
    IntArray,
    MemoryFormat,
    Phase,
    Precision,
)
from trappm.profiler.simulation.kernel_profile import KernelProfile, KernelTable
from trappm.profiler.simulation.step_profile import SavedBytes, StepProfile
from trappm.profiler.simulation.step_trace import TRACED_BATCH_SIZES, Origin, StepTrace
from trappm.profiler.tracing.fusion import FusedKernelLog
from trappm.profiler.tracing.gpu_functions import TRACED_GPU, GpuFunctions
from trappm.profiler.tracing.kernel_log import AllocationLog, KernelLog, kernel_table
from trappm.profiler.tracing.known_values import KnownValues, check_memory
from trappm.profiler.tracing.losses import Loss, default_loss
from trappm.profiler.tracing.step_recorder import StepRecorder

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent) + os.sep
_TRAPPM = str(Path(__file__).parents[2]) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_PACKAGES = str(Path(torch.__file__).parents[1]) + os.sep


class OriginLog:
    """Follows which module of a model runs.

    Autograd numbers its nodes in the order of the forward pass; by this number the backward pass
    finds the forward operator.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._by_node: dict[int, tuple[str, str]] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Follow the modules of this model within the block."""
        self._stack.clear()
        self._by_node.clear()
        hooks = []
        for name, module in model.named_modules():
            hooks += [
                module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)),
                module.register_forward_hook(lambda *_: self._leave(), always_call=True),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __call__(self, operator: Any) -> Origin:
        """Return the origin of a tensor that this operator has just made."""
        name = operator._schema.name.removeprefix("aten::") if operator is not None else ""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:  # what is computed again has modules in the backward pass
            module = self._stack[-1] if self._stack else ""
            line = _line_of_model()
            number = torch._C._autograd._get_sequence_nr()
            self._by_node[number - 1] = module, line
        else:
            number = node._sequence_nr()
            while number not in self._by_node and 0 < number < sys.maxsize:
                number -= 1
            module, line = self._by_node.get(number, ("", ""))
        return Origin(module, name, line, node is not None)

    def _leave(self) -> None:
        self._stack.pop()


def _line_of_model() -> str:
    """Return the innermost line of the model's code, or an empty text."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        path = frame.f_code.co_filename
        if _is_of_model(path):
            is_ours = path.startswith(_TRAPPM)  # inputs and losses that are made for the model
            return "" if is_ours else f"{short_path(path)}:{line}"
    return ""


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the model's code in an error's traceback, or an empty text."""
    frames = ((f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__))
    lines = [f"{short_path(path)}:{line}" for path, line in frames if _is_of_model(path)]
    return lines[-1] if lines else ""


def _is_of_model(path: str) -> bool:
    if path.startswith(_PACKAGES):  # these may lie below the standard library
        return not path.startswith(_TORCH)
    return not path.startswith((_OURS, _STANDARD, "<frozen", "<string>"))


def short_path(path: str) -> str:
    """Return a path relative to the installed packages or the current folder."""
    for folder in (_PACKAGES, os.getcwd() + os.sep):
        if path.startswith(folder):
            return path.removeprefix(folder)
    return path


_NO_GRAD = ("does not require grad", "nference tensor")
"""Parts of PyTorch's messages about a gradient within inference mode."""
CHECKED_BATCH_SIZE = 3
"""Third batch size, where sizes do not seem to be affine."""
OTHER_BATCH_SIZE = 131
"""Third batch size of modules that are not of a library: a prime number beyond round ones, as sizes
may be affine up to some batch only, or be rounded up."""
_HALF = {Precision.AMP_FP16: torch.float16, Precision.AMP_BF16: torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a step, apart from its batch size."""

    precision: Precision = Precision.FP32
    """Types under autocast; with `bf16`, parameters and inputs have that type."""
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    """Layout of images and weights."""
    fused_attention: bool = True
    """True if the software stack has a kernel for attention."""
    loss: Loss = default_loss
    """Loss of the output and the inputs."""
    is_compiled: bool = False
    """True for the kernels of a step under `torch.compile`; its allocations are the eager ones."""
    refuses_changes: bool = True
    """True if a training step may not change in place what its backward pass needs."""


@dataclass(frozen=True)
class _Recorded:
    """One step at one batch size."""

    allocations: AllocationLog
    kernels: KernelLog
    graph: Graph | None

    @property
    def order(self) -> IntArray:
        """Kind and block of every event (E, 2)."""
        return self.allocations.events()[:, :2]

    @property
    def sizes(self) -> IntArray:
        """Sizes of all allocations and kernels, in order."""
        return np.concatenate([self.allocations.events()[:, 2], self.kernels.sizes().ravel()])


class Tracer:
    """Traces one model, run in one way.

    Args:
        model, inputs, options: Model on the meta device, whose mode changes, and how it is run.
        batch_sizes: Two different ones, or twice the only one of the model.
        with_origins: Whether to find the origin of each tensor, which takes longer.
        original: The module that `model` is a copy of, to run the step on its values and on those
            of the inputs, on the CPU; there must be one batch size only.
        is_named: Whether the model is a library's, of which two batch sizes tell enough.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        options: StepOptions | None = None,
        batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES,
        *,
        with_origins: bool = False,
        original: nn.Module | None = None,
        is_named: bool = False,
    ) -> None:
        self._is_named = is_named
        self._model = model
        self._original = original
        self._inputs = inputs
        self._options = options or StepOptions()
        self._batch_sizes = batch_sizes
        self._origin_log = OriginLog() if with_origins else None
        self._known: dict[tuple[Phase, bool], tuple[_Recorded, _Recorded]] = {}
        self._infers_with_grad = False
        """True if inference computes a gradient, such as of an energy, so only no_grad applies."""
        self._infers_with_labels = False
        """True if inference needs what only training should, such as labels."""
        self.assumed: set[str] = set()
        """Remarks on steps that looked at values which the example does not have."""
        self.origins: dict[Phase, Sequence[Origin]] = {}
        """Origin of each block, by traced phase."""

    def graph(self) -> GraphTemplate:
        """Return the graph of the forward pass in inference.

        Raises:
            UnsupportedModelError: It depends on values, or has an output without a batch axis.
            TrappmError: Its structure changes with the batch size, or it mixes samples.
        """
        recorded = self._record_twice(Phase.INFER, with_graph=True)
        first, second = (cast(Graph, r.graph) for r in recorded)
        if self._single:
            return GraphTemplate.fixed(first)
        template = GraphTemplate.from_graphs(first, second)
        if any((constant < 0).any() for constant in template.constant.values()):
            # Perhaps not affine in the batch size, but with the square of it.
            third = self._record(Phase.INFER, CHECKED_BATCH_SIZE, with_graph=True).graph
            template = GraphTemplate.from_graphs(first, second, third)
        return template

    def step(self) -> StepProfile:
        """Return allocations and kernels of both phases.

        Raises:
            UnsupportedModelError: A step depends on values.
            UnevenSizesError: A size is not affine in the batch size.
            BatchOrderError: Other operators run at another batch size.
        """
        options, parameters = self._options, list(self._model.parameters())
        infer_trace, infer_kernels = self.phase(Phase.INFER)
        train_trace, train_kernels = self.phase(Phase.TRAIN)
        first, second = (r.allocations for r in self._known[Phase.TRAIN, False])
        slope = (second.saved_bytes - first.saved_bytes) // self._span
        trained = [p for p in parameters if id(p) in first.gradients]
        kernels = KernelProfile(
            train=train_kernels,
            infer=infer_kernels,
            parameter_tensors=len(trained),
            parameters=sum(p.numel() for p in trained),
            precision=options.precision,
            memory_format=options.memory_format,
            fused_attention=options.fused_attention,
            batch_size=self._batch_sizes[0] if self._single else None,
        )
        return StepProfile(
            trace=train_trace,
            saved_bytes=SavedBytes(first.saved_bytes - slope * self._batch_sizes[0], slope),
            trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            frozen_parameters=sum(p.numel() for p in parameters if not p.requires_grad),
            infer_trace=infer_trace,
            kernels=kernels,
        )

    @property
    def _single(self) -> bool:
        return self._batch_sizes[0] == self._batch_sizes[1]

    @property
    def _span(self) -> int:
        return max(self._batch_sizes[1] - self._batch_sizes[0], 1)

    def phase(self, phase: Phase) -> tuple[StepTrace, KernelTable]:
        """Return allocations and kernels of one phase.

        Raises:
            UnsupportedModelError, UnevenSizesError, BatchOrderError: As `step`.
        """
        first, second = self._record_twice(phase)
        if not np.array_equal(first.order, second.order):
            raise BatchOrderError("the order of allocations changes with the batch size")
        if len(first.kernels) != len(second.kernels):
            raise BatchOrderError("the number of kernels changes with the batch size")
        self._check_growth(phase, first, second)
        self.origins[phase] = tuple(first.allocations.origins)
        log, parameters = first.allocations, list(self._model.parameters())
        places = [place for place, p in enumerate(parameters) if id(p) in log.gradients]
        fixed = [*(p for p in parameters if id(p) not in log.gradients), *self._model.buffers()]
        events = log.events()
        trace = StepTrace(
            kinds=events[:, 0].astype(np.int8),
            blocks=events[:, 1].astype(np.int32),
            sizes=np.stack([events[:, 2], second.allocations.events()[:, 2]], axis=1),
            gradients=np.array(
                [log.gradients[id(parameters[place])] for place in places], dtype=np.int32
            ),
            parameter_bytes=_storage_bytes([parameters[place] for place in places]),
            parameter_places=np.array(places, dtype=np.int64),
            buffer_bytes=_storage_bytes(fixed),
            batch_sizes=(self._batch_sizes[0], self._batch_sizes[0] + self._span),
        )
        kernels, others = first.kernels, second.kernels
        if isinstance(kernels, FusedKernelLog) and isinstance(others, FusedKernelLog):
            others.fuse()
            kernels.fuse(others)
        return trace, kernel_table(kernels, others, self._batch_sizes)

    def _check_growth(self, phase: Phase, first: _Recorded, second: _Recorded) -> None:
        """Raise UnevenSizesError if a size of the step is not affine in the batch size.

        Sizes of all pairs of samples are not: the line through two of them begins below 0. Then,
        and for modules that are not of a library, a third batch size is tried.
        """
        if self._single:
            return
        slope, rest = np.divmod(second.sizes - first.sizes, self._span)
        fixed = first.sizes - slope * self._batch_sizes[0]
        is_doubtful = rest.any() or (fixed < 0).any()
        checked = [CHECKED_BATCH_SIZE] * bool(is_doubtful) + [OTHER_BATCH_SIZE] * (
            not self._is_named
        )
        for batch_size in checked:
            third = self._record(phase, batch_size, with_graph=False)
            if np.array_equal(third.sizes, fixed + slope * batch_size):
                continue
            raise UnevenSizesError(
                "some tensors grow faster than the batch, as where all samples are compared"
            )

    def _record_twice(
        self, phase: Phase, *, with_graph: bool = False
    ) -> tuple[_Recorded, _Recorded]:
        if (phase, True) in self._known:
            with_graph = True
        if (phase, with_graph) not in self._known:
            first = second = self._record(phase, self._batch_sizes[0], with_graph=with_graph)
            if self._original is None:
                second = self._record(phase, self._batch_sizes[1], with_graph=with_graph)
            if not np.array_equal(first.order, second.order):
                # Some models keep what their first step makes, such as ConViT its table of
                # positions.
                first = self._record(phase, self._batch_sizes[0], with_graph=with_graph)
            self._known[phase, with_graph] = first, second
        return self._known[phase, with_graph]

    def _graph_log(self, inputs: Sequence[Tensor], values: KnownValues) -> GraphLog:
        return GraphLog(
            self._model,
            inputs,
            at_one_batch=self._single,
            by_values=self._original is not None,
            is_known=values.has_number,
        )

    def _record(self, phase: Phase, batch_size: int, *, with_graph: bool) -> _Recorded:
        """Record a step; one of inference as the model allows it, which the tracer remembers."""
        inputs = self._inputs.in_phase(phase)
        if phase is Phase.TRAIN:
            return self._record_run(phase, inputs, batch_size, with_graph=with_graph)
        while True:
            try:
                if self._infers_with_labels:
                    inputs = self._inputs
                return self._record_run(phase, inputs, batch_size, with_graph=with_graph)
            except UnsupportedModelError as error:
                if not self._infers_with_grad and any(word in str(error) for word in _NO_GRAD):
                    self._infers_with_grad = True
                elif not self._infers_with_labels and self._inputs.has_labels:
                    self._infers_with_labels = True
                else:
                    raise

    def _gradients(self, *, training: bool) -> contextlib.AbstractContextManager[object]:
        """Return the mode in which gradients are computed, or are not."""
        if training:
            return torch.enable_grad()
        return torch.no_grad() if self._infers_with_grad else torch.inference_mode()

    def _record_run(
        self, phase: Phase, inputs: Inputs, batch_size: int, *, with_graph: bool
    ) -> _Recorded:
        model, log = self._model, self._origin_log
        original, options = self._original, self._options
        training = phase is Phase.TRAIN
        model.train(training)
        parameters = list(model.parameters())
        args, kwargs = _batch(inputs, batch_size, options)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        allocations = AllocationLog((*parameters, *model.buffers()), log)
        kernels = FusedKernelLog(allocations) if options.is_compiled else KernelLog()
        values = KnownValues(everything=original is not None)
        functions = GpuFunctions(kernels, options.fused_attention, values)
        # A graph that ends in `.item()` is freed at once only if it does not hold its own results.
        keep = allocations.keep if original is None else lambda t: allocations.keep(t).detach()
        keeping = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (keep(tensor), tensor._version),
            _unchanged if options.refuses_changes else itemgetter(0),
        )
        hooks = [
            p.register_post_accumulate_grad_hook(allocations.accumulated)  # type: ignore[no-untyped-call]
            for p in parameters
            if p.requires_grad
        ]
        following = contextlib.nullcontext() if log is None else log.watching(model)
        graph = self._graph_log(tensors, values) if with_graph else None
        _set_values(values, tensors, inputs, batch_size)
        if original is not None:
            _set_weights(values, model, original)
        recorder = StepRecorder(allocations, kernels, functions, graph, values)
        try:
            with (
                self._gradients(training=training),
                following,
                _seeded(values.everything),
                _no_collector(),
                _eager(),
                TRACED_GPU,
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # of sizes read while tracing, for instance
                allocations.begin(tensors)
                with recorder, functions, _autocast(options):
                    with keeping if training else contextlib.nullcontext():
                        output = model(*args, **{k: v for k, v in kwargs.items() if k != TARGETS})
                    recorder.end_model()
                    made = None if graph is None else graph.graph(output, batch_size)
                    if not training:
                        allocations.end_forward()
                        del output
                        return _Recorded(allocations, kernels, made)
                    loss = options.loss(output, (args, kwargs))
                    del output
                    recorder.end_forward()
                    _run_backward(loss, values)
                    allocations.note_gradients(parameters)
                    del loss
            return _Recorded(allocations, kernels, None)
        except TrappmError:
            raise
        except Exception as error:
            raise _refusal(phase, error, recorder.failed) from error
        finally:
            self.assumed |= values.assumed
            for hook in hooks:
                hook.remove()
            allocations.closed = True
            for parameter in parameters:
                parameter.grad = None


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Return what autograd saved of a tensor; with hooks, it does not check this itself."""
    tensor, version = saved
    if tensor._version != version:
        raise InputError(
            f"the backward pass needs a tensor of shape {tuple(tensor.shape)} as it was before an "
            "operator changed it in place, which PyTorch refuses; use the operator without _"
        )
    return tensor


def _autocast(options: StepOptions) -> torch.autocast:
    half = _HALF.get(options.precision)
    return torch.autocast("cuda", half, enabled=half is not None)


def _refusal(phase: Phase, error: Exception, operator: Any) -> UnsupportedModelError:
    """Return one line with the model's line of code, the operator and the reason of a failure."""
    what = "the training step" if phase is Phase.TRAIN else "its forward pass"
    why = one_line(error)
    if "Cannot access storage" in why:
        why = "has a sparse tensor, whose memory is not simulated; use a dense one"
    if operator is not None:
        name = operator._schema.name
        if operator.namespace == "quantized":
            why = "is quantized, which PyTorch runs on CPUs only; give the module before that"
        why = f"{why} ({name})"
        if needs_values(operator) or "meta tensor" in str(error):
            why = f"needs the values of a tensor ({name})"
    where_and_why = f"{line_of_error(error)} {why}".strip().rstrip(".")
    return UnsupportedModelError(f"{what} cannot be traced: {where_and_why}")


def _batch(
    inputs: Inputs, batch_size: int, options: StepOptions
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def in_bf16(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if is_real else value

    batch = inputs.batch(batch_size, options.memory_format)
    return tree_map(in_bf16, batch) if options.precision is Precision.BF16 else batch


def _storage_bytes(tensors: Sequence[Tensor]) -> IntArray:
    return np.array([t.untyped_storage().nbytes() for t in tensors], dtype=np.int64)


def _eager() -> contextlib.AbstractContextManager[object]:
    """Run what `torch.compile` made as plain Python, unless dynamo is not even imported."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def _seeded(draws: bool) -> Iterator[None]:
    """Draw the same random numbers each time, and leave those of the caller as they are."""
    with torch.random.fork_rng(devices=[], enabled=draws):
        if draws:
            torch.manual_seed(0)
        yield


def _set_values(
    values: KnownValues, tensors: Sequence[Tensor], inputs: Inputs, batch_size: int
) -> None:
    """Set the values of the inputs, as far as a step may depend on them."""
    known = inputs.values(batch_size)
    if values.everything:
        known = cast(ExampleInputs, inputs).values(batch_size, floats=True)
    for tensor, value in zip(tensors, known, strict=True):
        if value is not None:
            values.set(tensor, value)


def _set_weights(values: KnownValues, model: nn.Module, original: nn.Module) -> None:
    """Set the values of a copy's parameters, buffers and other tensors."""
    for tensor, real in zip(_tensors_of(model), _tensors_of(original), strict=True):
        if not real.is_meta and real.layout is torch.strided:
            check_memory([real])
            values.set(tensor, real.detach().to("cpu", tensor.dtype, copy=True))


def _run_backward(loss: Tensor, values: KnownValues) -> None:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise InputError(
            f"the loss has the shape {tuple(loss.shape)}, and PyTorch trains a single number; give "
            "a loss that is reduced, such as by .mean()"
        )
    if not values.everything:
        loss.backward()  # type: ignore[no-untyped-call]
        return
    gradient = torch.ones_like(loss)
    values.forget(gradient)  # so that no other gradient is computed
    loss.backward(gradient)  # type: ignore[no-untyped-call]


def _tensors_of(module: nn.Module) -> list[Tensor]:
    others = (t for part in module.modules() for t in vars(part).values() if isinstance(t, Tensor))
    return [*module.parameters(), *module.buffers(), *others]


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Disable Python's collector, which takes a tenth of the time and frees at random."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
