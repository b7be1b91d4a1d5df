"""Predictions of time, speedup and memory of a training step on several GPUs.

The step on one GPU comes from `predict`. Its kernels are scaled to the predicted time and scheduled
together with the collectives of a strategy (`schedules`). The memory saved by sharding is
subtracted from the memory on one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, hypot, log
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from trappm.extensions.parallel.links import NodeLinks, RankGroup, node_of
from trappm.extensions.parallel.schedules import Parallelism, ShardingStrategy, strategy_of
from trappm.prediction.cost import prices_of
from trappm.prediction.fit import MemoryAnswer, Verdict, room_text
from trappm.prediction.question import Question
from trappm.prediction.selection import Selection, precision_gap
from trappm.profiler.devices.catalogue import process_memory_mib
from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.extensions import extension_modules
from trappm.profiler.host.environment import independent_of_caller
from trappm.profiler.models.known_names import is_prefixed
from trappm.profiler.models.pool import is_megatron
from trappm.profiler.records import Phase, Precision, StepSettings, number_text

if TYPE_CHECKING:
    from trappm.extensions.parallel.model_parallel import DividedStep
    from trappm.extensions.parallel.rank_memory import MemoryNeeds
    from trappm.extensions.parallel.schedules import StepSchedule
    from trappm.extensions.parallel.step_work import StepWork
    from trappm.learner.interface import TrainedHeads, Workload
    from trappm.learner.physics.step_time import StepTimePrior
    from trappm.learner.snapshots.snapshot import Snapshot
    from trappm.prediction.models import Subject
    from trappm.prediction.prediction import Prediction

MIB = 1 << 20
SPREAD_90 = NormalDist().inv_cdf(0.95)
"""Half-width of a 90 % normal interval in standard deviations."""
_OF_ONE_GPU = (
    "model", "device", "device_name", "device_is_default", "batch_size", "sequence_length",
    "precision", "optimizer", "capacity_mib",
)  # fmt: skip
"""Fields copied from the prediction for one GPU."""
FRAGMENTS = 0.1
"""Allocator's share on top of a rank's activations in mixed precision; a round number."""
MIXED_REMARK = "On several GPUs, 16-bit parameters have main copies in fp32, as in Megatron-LM."
MIXED_ERRORS = 0.88, 1.13
"""Measured over predicted memory in mixed precision: bounds of 90 % of bigscience's 77 runs with
their shape, on which the bytes per parameter were chosen (docs/research/memory.md)."""
PROCESS = "allocator_and_libraries"
"""Key of the GPU memory that the step's tensors do not use."""


@dataclass(frozen=True, kw_only=True)
class ParallelPrediction(MemoryAnswer):
    """Prediction of a training step on several GPUs."""

    model: str
    device: str
    device_name: str
    """Display name of the device."""
    device_is_default: bool
    strategy: str
    gpus: int
    """GPUs per node."""
    nodes: int
    accumulation: int
    """Forward and backward passes per optimizer step."""
    tensor: int
    """GPUs that split each product."""
    pipeline: int
    """Stages of the model."""
    sharded_optimizer: bool
    """True if replicas divide the optimizer states."""
    sequence_parallel: bool
    """True if the GPUs of a product divide hidden states."""
    batch_size: int
    """Samples per pass and GPU, or per pass and tensor-parallel group."""
    sequence_length: int | None
    """Tokens per sample; None for models without text input."""
    precision: str
    optimizer: str
    links: str
    """Description of the assumed links within and between nodes."""
    step_time_ms: float
    compute_ms: float
    exposed_ms: float
    """Communication time that does not overlap with compute."""
    waiting_ms: float
    """Additional wait for the slowest GPU."""
    communication_ms: float
    """Time of all collectives, including overlapped ones."""
    samples_per_s: float
    """Throughput of all GPUs together."""
    speedup: float
    """Ratio of the throughput to that of one GPU with the same batch and accumulation."""
    memory_mib: float | None
    """Peak memory of the GPU that needs most."""
    memory_parts_mib: Mapping[str, float] = field(default_factory=dict)
    capacity_mib: float | None
    usd_per_million: float | None
    """Price of a million samples at the cheapest known offer, in USD."""
    intervals: Mapping[str, tuple[float, float]]
    """90 % intervals of memory, step time and samples per second."""
    snapshot: str
    remarks: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def layout(self) -> str:
        """Return the strategy with its numbers of ranks per product and of stages, if any."""
        parts = [f"tensor {self.tensor}"] * (self.tensor > 1)
        parts += [f"pipeline {self.pipeline}"] * (self.pipeline > 1)
        return " ".join([self.strategy, *parts])

    def to_dict(self) -> dict[str, Any]:
        return {
            "sentence": str(self),
            **asdict(self),
            "ranks": self.ranks,
            "fits": self.fits,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        """Return the prediction in one or two sentences."""
        low, high = (number_text(bound, 3) for bound in self.intervals["step_time_ms"])
        device = f"{self.device_name} (default)" if self.device_is_default else self.device_name
        memory, verdict, room = self.memory, self.verdict, ""
        if memory is not None and verdict is not None and self.capacity_mib is not None:
            room = f"{room_text(verdict, device, memory, self.capacity_mib)} per GPU. "
        takes = "would take" if verdict is Verdict.DOES_NOT_FIT else "takes"
        tokens = "" if self.sequence_length is None else f" and {self.sequence_length:,} tokens"
        count = f"{self.ranks} GPUs" if self.ranks > 1 else "one GPU"
        return (
            f"{room}A step on {count if room else f'{count} ({device})'} {takes} "
            f"{number_text(self.step_time_ms, 3)} ms ({low} to {high}) in {self.precision} at "
            f"batch {self.batch_size:,}{tokens} per GPU: {number_text(self.samples_per_s, 3)} "
            f"samples/s, {self.speedup:.1f} times one GPU."
        )


@independent_of_caller
def predict_parallel(
    model: str,
    *,
    device: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    strategy: str = ShardingStrategy.DDP,
    accumulation: int = 1,
    tensor: int | None = None,
    pipeline: int = 1,
    sharded_optimizer: bool = False,
    sequence_parallel: bool = False,
    network_gbit: float | None = None,
    batch_size: int | None = None,
    input_size: int | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
    memory_format: str | None = None,
    optimizer: str | None = None,
    snapshot: str | None = None,
) -> ParallelPrediction:
    """Predict a training step on several GPUs.

    Args:
        model: Timm name, transformer such as `hf:gpt2`, or path of an ONNX file.
        device: Device by any of its names (default: `DEFAULT_DEVICE`).
        gpus: GPUs per node.
        nodes: Number of nodes.
        strategy: `ddp`, `fsdp` or `tp`.
        accumulation: Forward and backward passes per optimizer step.
        tensor: GPUs that split each product with `tp` (default: all of a node).
        pipeline: Stages that split the blocks of the model with `tp`.
        sharded_optimizer: Whether replicas divide the optimizer states (ZeRO-1, or Megatron's
            distributed optimizer) with `ddp` and `tp`.
        sequence_parallel: Whether the GPUs of a product divide hidden states by their tokens, too,
            with `tp` (Megatron-LM's option of this name).
        network_gbit: Network speed per node in Gbit/s (default: that of a typical node).
        batch_size: Samples per pass and GPU (default: that of the ONNX file, or 1).
        input_size, sequence_length, precision, memory_format, optimizer, snapshot: As for
            `predict`.

    Raises:
        InputError: Sizes are not divisible, or the strategy does not support the model.
        TrappmError: As `predict`.
    """
    chosen = Parallelism(
        strategy=strategy_of(strategy),
        gpus=gpus,
        nodes=nodes,
        accumulation=accumulation,
        tensor=tensor,
        pipeline=pipeline,
        sharded_optimizer=sharded_optimizer,
        sequence_parallel=sequence_parallel,
    )
    step = SharedStep.of(
        model,
        device,
        batch_size=batch_size,
        input_size=input_size,
        sequence_length=sequence_length,
        precision=precision,
        memory_format=memory_format,
        optimizer=optimizer,
        snapshot=snapshot,
    )
    return step.on(chosen, network_gbit)


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedStep:
    """A step on one GPU, prepared for predictions with any parallel strategy."""

    single: Prediction
    work: StepWork
    """Work of the step, scaled to the predicted time."""
    needs: MemoryNeeds
    node: NodeLinks
    divided: DividedStep | None = None
    """Step whose blocks can be divided; None if the model has no identical blocks."""
    mixed: MemoryNeeds | None = None
    """Memory in 16 bits with main copies in fp32; None in other precisions, without Adam, and for
    models other than transformers, which no published run judges."""

    @classmethod
    def of(
        cls,
        model: str | Subject,
        device: str | None = None,
        *,
        batch_size: int | None = None,
        input_size: int | None = None,
        sequence_length: int | None = None,
        snapshots: Sequence[Snapshot] | None = None,
        **settings: Any,
    ) -> SharedStep:
        """Predict the step on one GPU, and load its kernels and tensors."""
        question = Question(batch_size=batch_size, phase=Phase.TRAIN, **settings)
        selection = Selection(question, snapshots)
        key = selection.device_keys(device, None)[0]
        node = node_of(key)  # before torch is imported, which takes a second
        from trappm.extensions.parallel.model_parallel import LAUNCH_US
        from trappm.extensions.parallel.rank_memory import traced_needs
        from trappm.prediction.answer import answer_questions
        from trappm.prediction.models import Subject, subject_of
        from trappm.profiler.memory.simulation import TrainingLoop

        subject = model
        if not isinstance(subject, Subject):
            subject = subject_of(model, input_size=input_size, sequence_length=sequence_length)
        [single] = answer_questions([(selection, subject, key)])
        if single.step_time_ms is None:
            raise UnsupportedModelError("; ".join(single.gaps()))
        trained, _ = selection.trained(key, subject.name)
        workload, prior = _workload(selection, subject, trained, single.batch_size)
        allocations = None if workload.trace is None else workload.trace.allocations
        if allocations is None:
            raise UnsupportedModelError("the step could not be traced, so scaling is unknown")
        loop = TrainingLoop(optimizer=workload.optimizer)
        checkpoints = "checkpointing" in subject.name.split(",")
        needs = traced_needs(allocations, workload.batch_size, loop, checkpoints=checkpoints)
        work, divided = _work(workload, prior, needs.all_gradients)
        if divided is not None:
            slower = single.step_time_ms / work.step_ms
            launch_us = LAUNCH_US if is_megatron(subject.name) else None
            divided = replace(divided, slower=slower, launch_us=launch_us)
        card = selection.snapshot_for(key).card(key)
        slowed = (
            extension.contention(subject.name, card, workload.precision)
            for extension in extension_modules("model_heads")
        )
        work = replace(work, contention=next(filter(None, slowed), work.contention))
        return cls(
            single=single,
            work=work.lasting(single.step_time_ms),
            needs=needs,
            mixed=_mixed_needs(subject, selection.settings(trained), needs, workload, key),
            node=node,
            divided=divided,
        )

    def on(self, parallelism: Parallelism, network_gbit: float | None = None) -> ParallelPrediction:
        """Return the prediction with a parallel strategy."""
        from trappm.extensions.parallel.rank_memory import rank_memory

        single, node = self.single, self.node
        if parallelism.gpus > node.most_gpus:
            raise InputError(
                f"a node has at most {node.most_gpus} GPUs of type {single.device}, not "
                f"{parallelism.gpus}; use more nodes"
            )
        if network_gbit is not None:
            node = node.with_network(network_gbit)
        step = self._make_schedule(parallelism, node)
        alone = self._make_schedule(Parallelism(accumulation=parallelism.accumulation), node)
        samples = single.batch_size * parallelism.accumulation * parallelism.data_parallel
        rate = 1000 * samples / step.step_ms
        low_ms, high_ms = self._interval(parallelism, node, step.step_ms)
        mixed = self.mixed if self._is_mixed(parallelism) else None
        rank = rank_memory(mixed or self.needs, parallelism)
        parts = {name: size / MIB for name, size in asdict(rank).items()}
        memory_mib, intervals = None, {}
        if mixed is not None:
            fragments_mib = FRAGMENTS * rank.activations / MIB
            parts[PROCESS] = process_memory_mib(single.device, Phase.TRAIN) + fragments_mib
            memory_mib = sum(parts.values())
            low, high = MIXED_ERRORS
            intervals["memory_mib"] = low * memory_mib, high * memory_mib
        elif single.memory_mib is not None:
            plain = rank_memory(self.needs, Parallelism())
            process_mib = single.memory_mib - plain.total / MIB
            if single.is_memory_simulated:  # of a full card, it is the least memory of the step
                process_mib = max(process_mib, process_memory_mib(single.device, Phase.TRAIN))
            parts[PROCESS] = process_mib
            memory_mib = sum(parts.values())
            share = memory_mib / single.memory_mib
            low_mib, high_mib = single.intervals["memory_mib"]
            intervals["memory_mib"] = (share * low_mib, share * high_mib)
        prices = [price.usd_per_hour for price in prices_of(single.device, card=single.card)]
        usd = min(prices) * parallelism.ranks / 3600 * 1e6 / rate if prices else None
        return ParallelPrediction(
            **{name: getattr(single, name) for name in _OF_ONE_GPU},
            strategy=parallelism.strategy.value,
            gpus=parallelism.gpus,
            nodes=parallelism.nodes,
            accumulation=parallelism.accumulation,
            tensor=parallelism.tensor_parallel,
            pipeline=parallelism.pipeline,
            sharded_optimizer=parallelism.sharded_optimizer,
            sequence_parallel=parallelism.sequence_parallel,
            links=_links(node, parallelism),
            step_time_ms=step.step_ms,
            compute_ms=step.compute_ms,
            exposed_ms=step.exposed_ms,
            waiting_ms=step.waiting_ms,
            communication_ms=step.communication_ms,
            samples_per_s=rate,
            speedup=parallelism.data_parallel * alone.step_ms / step.step_ms,
            memory_mib=memory_mib,
            memory_parts_mib={name: size for name, size in parts.items() if size},
            usd_per_million=usd,
            intervals={
                **intervals,
                "step_time_ms": (low_ms, high_ms),
                "samples_per_s": (1000 * samples / high_ms, 1000 * samples / low_ms),
            },
            snapshot=f"{single.snapshot}",
            remarks=(*single.remarks, *([MIXED_REMARK] if mixed else [])),
        )

    def _is_mixed(self, parallelism: Parallelism) -> bool:
        """Return whether ranks keep 16-bit parameters with main copies in fp32."""
        replicated = parallelism.ranks > 1 and parallelism.strategy is not ShardingStrategy.FSDP
        return replicated and (parallelism.sharded_optimizer or is_megatron(self.single.model))

    def _make_schedule(
        self,
        parallelism: Parallelism,
        node: NodeLinks,
        step_ms: float | None = None,
        hooks: float = 1.0,
    ) -> StepSchedule:
        """Return the schedule, optionally if one GPU took `step_ms`, and FSDP's hooks more."""
        from trappm.extensions.parallel.model_parallel import schedule_divided
        from trappm.extensions.parallel.schedules import schedule

        factor = 1.0 if step_ms is None else step_ms / self.work.step_ms
        megatron = is_megatron(self.single.model)
        is_ddp = parallelism.strategy is ShardingStrategy.DDP and parallelism.ranks > 1
        if parallelism.strategy is not ShardingStrategy.TP and not (megatron and is_ddp):
            work = self.work.lasting(factor * self.work.step_ms)
            work = replace(work, hooks_ms=hooks * work.hooks_ms)
            return schedule(work, parallelism, node)
        if self.divided is None:
            raise InputError(
                "strategy tp needs a model with identical blocks of linear layers; use ddp or fsdp "
                "for this model"
            )
        step = schedule_divided(self.divided, parallelism, node)
        return replace(step, step_ms=factor * step.step_ms)

    def _interval(
        self, parallelism: Parallelism, node: NodeLinks, step_ms: float
    ) -> tuple[float, float]:
        """Return the 90 % interval, with independent errors of one GPU and of collectives."""
        spread = RankGroup(node=node, gpus=parallelism.gpus, nodes=parallelism.nodes).spread
        bounds = self.single.intervals["step_time_ms"]
        widths = []
        from trappm.extensions.parallel.step_work import HOOKS_RANGE

        for bound_ms, sign in zip(bounds, (-1, 1), strict=True):
            slower = node.slower(exp(sign * SPREAD_90 * spread))
            hooks = HOOKS_RANGE**sign
            computed = self._make_schedule(parallelism, node, bound_ms, hooks).step_ms
            communicated = self._make_schedule(parallelism, slower).step_ms
            widths.append(hypot(log(computed / step_ms), log(communicated / step_ms)))
        return step_ms * exp(-widths[0]), step_ms * exp(widths[1])


def _mixed_needs(
    subject: Subject, settings: StepSettings, needs: MemoryNeeds, workload: Workload, card: str
) -> MemoryNeeds | None:
    """Return the memory needs with 16-bit parameters and main copies in fp32, if they apply.

    Raises:
        UnsupportedModelError: The step with 16-bit parameters cannot be traced.
    """
    from trappm.extensions.parallel import rank_memory
    from trappm.profiler.memory.simulation import TrainingLoop

    megatron, precision = is_megatron(subject.name), settings.precision
    is_16_bit = precision is Precision.BF16 or (megatron and not precision.is_fp32)
    is_covered = is_prefixed(subject.name) and settings.optimizer.is_adam
    if not (is_16_bit and is_covered):
        return None
    if precision is not Precision.BF16:  # autocast, which Megatron-LM does not use
        trace = subject.trace(settings._replace(precision=Precision.BF16), Phase.TRAIN)
        if trace.allocations is None:
            raise UnsupportedModelError(trace.refusal or "")
        loop = TrainingLoop(optimizer=settings.optimizer)
        needs = rank_memory.traced_needs(
            trace.allocations, workload.batch_size, loop, checkpoints=needs.checkpoints
        )
    if not megatron:
        return rank_memory.MEGATRON_LM.needs(needs)
    # Of published fp16 runs, those on V100s have sums in fp32, and those on A100s have not.
    sums = precision is not Precision.AMP_FP16 or precision_gap(card, Precision.BF16) is not None
    kind = rank_memory.DEEPSPEED_BF16 if sums else rank_memory.DEEPSPEED_FP16
    return kind.needs(needs)


def _workload(
    selection: Selection, subject: Subject, trained: TrainedHeads, batch_size: int
) -> tuple[Workload, StepTimePrior | None]:
    """Return the step with its trace and kernels, and the prior of its kernels' times, if any."""
    from trappm.learner.heads.physics_heads import kernel_head
    from trappm.learner.interface import Workload

    settings = selection.settings(trained)
    trace = subject.trace(settings, Phase.TRAIN, batch_size)
    workload = Workload.of(trace, settings, batch_size=batch_size, with_kernels=True)
    head = kernel_head(trained.heads)
    return workload, None if head is None else head.prior


def _work(
    workload: Workload, prior: StepTimePrior | None, gradient_bytes: float
) -> tuple[StepWork, DividedStep | None]:
    """Return the work from the step's kernels, or evenly spread without a prior for kernels."""
    from trappm.extensions.parallel.model_parallel import DividedStep
    from trappm.extensions.parallel.step_work import even_work, traced_work

    if prior is not None and workload.kernels is not None:
        return traced_work(workload, prior), DividedStep.of(workload, prior)
    return even_work(1.0, gradient_bytes), None


def _links(node: NodeLinks, parallelism: Parallelism) -> str:
    text = f"{node.name}: {node.inner.kind} with {node.inner.gbs:g} GB/s per GPU"
    if parallelism.nodes > 1:
        text += f", {node.network.gbs * 8:g} Gbit/s ({node.network.kind}) per node"
    return text
