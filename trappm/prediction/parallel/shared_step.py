"""Training on many GPUs: how long a step takes, how much faster it is, what each GPU keeps.

One GPU's answer is that of `predict`. The kernels of the step are scaled to its time and scheduled
beside the collectives of a strategy (`learner.physics.parallel`); what a rank keeps less than one
GPU is taken off its memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import exp, hypot, log
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from trappm.learner.physics.parallel.collectives import Group
from trappm.learner.physics.parallel.links import Node
from trappm.learner.physics.parallel.strategy import Parallelism, Strategy
from trappm.prediction.costs import prices_of
from trappm.prediction.parallel.known_links import known_node
from trappm.prediction.parallel.parallel_prediction import ParallelPrediction
from trappm.prediction.question import Question
from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.records import Phase, member
from trappm.profiler.transformers.names import is_transformer

if TYPE_CHECKING:
    from trappm.learner.heads.predictions import TrainedHeads
    from trappm.learner.physics.parallel.rank_memory import MemoryNeeds
    from trappm.learner.physics.parallel.step_work import StepWork
    from trappm.learner.workload import Workload
    from trappm.prediction.models.subjects import Subject
    from trappm.prediction.prediction import Prediction

MIB = 1 << 20
SPREAD_90 = NormalDist().inv_cdf(0.95)
"""Standard deviations on either side, within which 90 % lie."""
BESIDE = "allocator_and_libraries"
"""Key of the memory of a GPU that tensors of the step do not use."""


def predict_parallel(
    model: str,
    *,
    device: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    strategy: str = Strategy.DDP,
    accumulation: int = 1,
    network_gbit: float | None = None,
    batch_size: int | None = None,
    input_size: int | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
    memory_format: str | None = None,
    optimizer: str | None = None,
    snapshot: str | None = None,
) -> ParallelPrediction:
    """Predicts a training step on many GPUs.

    Args:
        model: a timm name, a transformer such as `hf:gpt2`, or the path of an ONNX file.
        device: by any of its names; `DEFAULT_DEVICE` by default.
        gpus: of each node.
        nodes: how many.
        strategy: `ddp`, `fsdp` or `tp`.
        accumulation: forward and backward passes before each optimizer step.
        network_gbit: of a node's network; by default that of the usual node of such cards.
        batch_size: samples of a GPU's pass; by default the file's own, or 1.
        input_size: pixels, as for `predict`.
        sequence_length: tokens, as for `predict`.
        precision, memory_format, optimizer, snapshot: as for `predict`.

    Raises:
        InputError: sizes that do not divide each other, or a model that cannot be shared so.
        TrappmError: as `predict`.
    """
    chosen = Parallelism(
        strategy=member("strategy", Strategy, strategy),
        gpus=gpus,
        nodes=nodes,
        accumulation=accumulation,
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
    """A step of one GPU, to be shared by many in any way."""

    single: Prediction
    work: StepWork
    """Its passes, as long as predicted."""
    needs: MemoryNeeds
    node: Node
    about_links: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        model: str | Subject,
        device: str | None = None,
        *,
        batch_size: int | None = None,
        input_size: int | None = None,
        sequence_length: int | None = None,
        **settings: Any,
    ) -> SharedStep:
        """Predict one GPU's step, and load its kernels and tensors."""
        question = Question(batch_size=batch_size, phase=Phase.TRAIN, **settings)
        key = question.device_keys(device, None)[0]
        node, about_links = known_node(key)  # before torch is imported, which takes a second
        from trappm.learner.physics.parallel.rank_memory import traced_needs
        from trappm.learner.physics.transformer_times import transformer_times
        from trappm.prediction.answering import answers
        from trappm.prediction.models.subjects import Subject, subject_of
        from trappm.profiler.simulation.training_loop import TrainingLoop

        subject = model
        if not isinstance(subject, Subject):
            subject = subject_of(model, input_size=input_size, sequence_length=sequence_length)
        [single] = answers([(question, subject, key)])
        if single.step_time_ms is None:
            raise UnsupportedModelError("; ".join(single.gaps()))
        trained, _ = question.trained(key, subject.name)
        workload, prior = _workload(question, subject, trained, single.batch_size)
        if workload.step is None:
            raise UnsupportedModelError("its step could not be traced, so it cannot be shared")
        loop = TrainingLoop(optimizer=workload.optimizer)
        needs = traced_needs(workload.step.trace, workload.batch_size, loop)
        work = _work(workload, prior, needs.all_gradients)
        card = question.snapshot_for(key).card(key)
        of_text = is_transformer(subject.name)
        times = transformer_times(card, workload.precision) if of_text else None
        if times is not None:
            work = replace(work, contention=times.contention)
        return cls(
            single=single,
            work=work.lasting(single.step_time_ms),
            needs=needs,
            node=node,
            about_links=about_links,
        )

    def on(self, parallelism: Parallelism, network_gbit: float | None = None) -> ParallelPrediction:
        """The step where it is shared in this way."""
        from trappm.learner.physics.parallel.rank_memory import rank_memory
        from trappm.learner.physics.parallel.schedules import schedule

        single, node = self.single, self.node
        if parallelism.gpus > node.most_gpus:
            raise InputError(
                f"no node has {parallelism.gpus} {single.device}; {node.most_gpus} at most: take "
                "more nodes"
            )
        if network_gbit is not None:
            node = node.with_network(network_gbit)
        step = schedule(self.work, parallelism, node)
        alone = schedule(self.work, Parallelism(accumulation=parallelism.accumulation), node)
        samples = single.batch_size * parallelism.accumulation * parallelism.data_parallel
        rate = 1000 * samples / step.step_ms
        low_ms, high_ms = self._interval(parallelism, node, step.step_ms)
        rank = rank_memory(self.needs, parallelism)
        parts = {name: size / MIB for name, size in asdict(rank).items()}
        memory_mib, intervals = None, {}
        if single.memory_mib is not None:
            plain = rank_memory(self.needs, Parallelism())
            parts[BESIDE] = single.memory_mib - plain.total / MIB
            memory_mib = sum(parts.values())
            share = memory_mib / single.memory_mib
            low_mib, high_mib = single.intervals["memory_mib"]
            intervals["memory_mib"] = (share * low_mib, share * high_mib)
        prices = [price.usd_per_hour for price in prices_of(single.device)]
        usd = min(prices) * parallelism.ranks / 3600 * 1e6 / rate if prices else None
        return ParallelPrediction(
            model=single.model,
            device=single.device,
            device_name=single.device_name,
            device_is_default=single.device_is_default,
            strategy=parallelism.strategy.value,
            gpus=parallelism.gpus,
            nodes=parallelism.nodes,
            accumulation=parallelism.accumulation,
            batch_size=single.batch_size,
            sequence_length=single.sequence_length,
            precision=single.precision,
            optimizer=single.optimizer,
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
            capacity_mib=single.capacity_mib,
            usd_per_million=usd,
            intervals={
                **intervals,
                "step_time_ms": (low_ms, high_ms),
                "samples_per_s": (1000 * samples / high_ms, 1000 * samples / low_ms),
            },
            snapshot=f"{single.snapshot}",
            remarks=(*self.about_links, *single.remarks),
        )

    def _interval(
        self, parallelism: Parallelism, node: Node, step_ms: float
    ) -> tuple[float, float]:
        """Where 90 % of steps lie: one GPU's interval, and collectives' errors, as independent."""
        from trappm.learner.physics.parallel.schedules import schedule

        spread = Group(node=node, gpus=parallelism.gpus, nodes=parallelism.nodes).spread
        bounds = self.single.intervals["step_time_ms"]
        widths = []
        for bound_ms, sign in zip(bounds, (-1, 1), strict=True):
            slower = node.slower(exp(sign * SPREAD_90 * spread))
            computed = schedule(self.work.lasting(bound_ms), parallelism, node).step_ms
            communicated = schedule(self.work, parallelism, slower).step_ms
            widths.append(hypot(log(computed / step_ms), log(communicated / step_ms)))
        return step_ms * exp(-widths[0]), step_ms * exp(widths[1])


def _workload(
    question: Question, subject: Subject, trained: TrainedHeads, batch_size: int
) -> tuple[Workload, Any]:
    """The step with its trace and kernels, and the prior of its time, None where there is none."""
    from trappm.learner.heads.device_heads import Heads
    from trappm.learner.workload import Workload

    settings = question.settings(trained)
    workload = Workload.of(
        subject.profile(),
        subject.step(settings),
        settings,
        phase=Phase.TRAIN,
        batch_size=batch_size,
        with_kernels=True,
    )
    heads = trained.heads
    head = heads.heads.get("step_time_ms") if isinstance(heads, Heads) else None
    return workload, None if head is None else head.prior


def _work(workload: Workload, prior: Any, gradient_bytes: float) -> StepWork:
    """By its kernels; evenly spread where no constants of kernels are known."""
    from trappm.learner.physics.parallel.step_work import even_work, traced_work
    from trappm.learner.physics.step_time_prior import StepTimePrior

    if isinstance(prior, StepTimePrior) and workload.kernels is not None:
        return traced_work(workload, prior)
    return even_work(1.0, gradient_bytes)


def _links(node: Node, parallelism: Parallelism) -> str:
    text = f"{node.name}: {node.inner.kind} of {node.inner.gbs:g} GB/s a GPU"
    if node.inner.source.startswith("characterised"):
        text += f", {node.inner.source}"
    if parallelism.nodes > 1:
        text += f", {node.network.gbs * 8:g} Gbit/s ({node.network.kind}) a node"
    return text
