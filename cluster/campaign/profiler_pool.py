"""A campaign's workers as Ray actors, one per device of a node.

A worker that ends is an event, not an error. Ray neither starts its actor again nor repeats its
measurement: another profiler is recruited, and the campaign decides what it measures.

Import this module inside `with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from trappm.cluster.campaign.workers import Finished, Task, Worker
from trappm.cluster.ray_runtime import (
    Placement,
    first_line,
    has_other_nodes,
    last_line,
    no_room,
    node_options,
    placement,
)
from trappm.cluster.trace_tasks import TraceTasks
from trappm.profiler.errors import DeviceError, one_line
from trappm.profiler.host.environment import code_refusal, stack_fingerprint, this_code
from trappm.profiler.records import Configuration, Measurement, is_cpu_device
from trappm.profiler.records import Protocol as MeasuringProtocol
from trappm.profiler.traced_step import TraceKey

POLL_S = 0.2

RECRUIT_S = 1.0
"""Period of the checks for new nodes."""

HUNG_S = 180.0
"""Seconds beyond a task's own time limit after which its profiler counts as hung."""

RELEASE_S = 10.0
"""Seconds without work after which idle GPUs of a kind are given back."""

REFUSED_S = 60.0
"""Longest pause before the next profiler of a kind after failed starts."""

EXCLUDED_S = 660.0
"""Seconds for which no profiler of a kind is started on a node that cannot measure at all: a minute
more than an autoscaler with our files leaves a node idle."""

LOCK_S = 60.0
"""Longest wait for another measurement on a GPU; Ray gives each GPU to one profiler."""

STARTS = 3
"""Number of failed starts in a row that end a campaign where no other node can join."""


class ProfilerActor:
    """Actor that measures on one device of its node, one configuration at a time."""

    def __init__(self, device: str) -> None:
        from trappm.profiler.measuring.isolation import Measurer

        self._device = device
        self._measurer = Measurer() if is_cpu_device(device) else Measurer(lock_timeout_s=LOCK_S)
        self._measurer.__enter__()

    def stay(self) -> None:
        """Never return, in a thread of its own: the call fails when this process ends."""
        threading.Event().wait()

    def describe(self) -> dict[str, Any]:
        """Return host, process, GPUs given by Ray, code, and fingerprint of the software stack.

        The `refusal` is the reason if it cannot measure here.
        """
        facts = {
            "code": this_code(),
            "host": ray.get_runtime_context().get_node_id(),
            "host_name": platform.node(),
            "process": process_identity(),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
        }
        try:
            from trappm.profiler.devices import open_device

            environment = open_device(self._device).environment()
        except Exception as error:  # a library that is missing or broken there, too
            return facts | {"refusal": f"host {platform.node()}: {one_line(error)}"}
        return facts | {"fingerprint": stack_fingerprint(environment)}

    def measure(
        self, configuration: Configuration, protocol: MeasuringProtocol, attempt_key: str
    ) -> Measurement:
        return self._measurer.measure(
            configuration, self._device, protocol, attempt_key=attempt_key
        )


def process_identity() -> tuple[int, float]:
    """Return id and start time of this process, for `kill_process`."""
    return os.getpid(), psutil.Process().create_time()


def kill_process(pid: int, began: float) -> None:
    """End a process of this node in any state, unless its id belongs to another one by now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.create_time() == began:
            process.kill()


@dataclass(eq=False)
class _Profiler:
    """A profiler actor; its worker is known once it has joined."""

    actor: Any
    device: str
    node_id: str | None
    """Node where it was put; None if Ray finds a GPU of its kind."""
    worker: Worker | None = None
    process: tuple[int, float] = (0, 0.0)


@dataclass
class _Kind:
    """Profilers of one device that are to come."""

    wanted: int = 0
    """Number of profilers that have work; fewer may come."""
    at_most: int = sys.maxsize
    """Number of profilers that there may be, as others need GPUs, too."""
    needed_at: float = field(default_factory=time.monotonic)
    """Time at which there was work last."""
    refused_until: float = 0.0
    failed_starts: int = 0
    excluded: dict[str, float] = field(default_factory=dict)
    """Nodes where no profiler is started, and the times until which that holds."""
    room: int = 0
    """Number of profilers that the cluster's GPUs have room for, excluded nodes left out."""
    is_told: bool = False
    """True if it was reported that no node has enough GPUs."""

    @property
    def is_refused(self) -> bool:
        return time.monotonic() < self.refused_until

    @property
    def avoided(self) -> frozenset[str]:
        now = time.monotonic()
        return frozenset(node_id for node_id, until in self.excluded.items() if now < until)


@dataclass(eq=False)
class ProfilerPool:
    """Profiler actors on GPUs of the campaign's kinds, and on each host of its CPU devices.

    There are as many as `want` allows: none while the pool is traced, as idle GPUs cost money.
    Profilers start within a second or so on nodes that join. Where the cluster may grow, those that
    wait for a GPU make an autoscaler act.

    A node that cannot measure gets no new profiler for some time. A single faulty GPU is held by
    its profiler, so that no other one gets it (`workers.WorkerChecks`).
    """

    devices: Sequence[str]
    may_grow: bool
    """True if unknown nodes may join."""
    tell: Callable[[str], None] = lambda message: None
    """Called with a line of news for each node that cannot measure."""
    profiler: type[Any] = ProfilerActor
    """Class of the actors."""

    def __post_init__(self) -> None:
        self._class = ray.remote(self.profiler)
        self._kinds = {device: _Kind() for device in self.devices}
        self._profilers: dict[str, _Profiler] = {}
        """Profilers that have joined, by the names of their workers."""
        self._joining: dict[Any, _Profiler] = {}
        self._running: dict[Any, tuple[Worker, Task, float]] = {}
        """Running tasks with the times at which they count as hung."""
        self._alive: dict[Any, _Profiler] = {}
        """Calls that fail when their profiler ends, and never return."""
        self._finished: list[Finished] = []
        """Finished tasks that were not returned yet."""
        self._set_aside = frozenset[str]()
        self._recruited_at = -RECRUIT_S

    def trace(self, keys: Sequence[TraceKey]) -> TraceTasks:
        """Begin to trace steps, on nodes that do not measure if there are any."""
        return TraceTasks(keys, off_devices=self.devices)

    @property
    def traces_elsewhere(self) -> bool:
        """Return whether steps are traced on nodes that do not measure."""
        return self.may_grow and has_other_nodes(self.devices)

    # Workers.

    def refresh_workers(self) -> Sequence[Worker]:
        """Start and end workers as asked for; return those that have joined."""
        self._recruit()
        return [profiler.worker for profiler in self._profilers.values() if profiler.worker]

    def list_awaited(self) -> Sequence[str]:
        """Return devices whose workers may still join."""
        joining = [profiler.device for profiler in self._joining.values()]
        joining += [device for device, kind in self._kinds.items() if kind.is_refused]
        absent = [device for device in self._kinds if not self._count(device)]
        return joining + (absent if self.may_grow else [])

    def room(self, device: str) -> int:
        """Return how many profilers of a device the cluster's GPUs have room for, now."""
        return self._kinds[device].room

    def want(
        self, wanted: Mapping[str, int], at_most: Mapping[str, int], set_aside: Collection[str] = ()
    ) -> None:
        """Announce by device how many profilers have work, and how many there may be at most.

        Where there is no work, none need join. What are too many give their GPUs to others.

        Args:
            wanted: Number of profilers by device, those that are set aside included.
            at_most: Number of profilers by device, those that are set aside included.
            set_aside: Names of workers that measure nothing and keep their GPUs.
        """
        self._set_aside = frozenset(set_aside)
        for device, kind in self._kinds.items():
            kind.at_most = at_most.get(device, kind.at_most)
            if wanted.get(device, 0) > kind.wanted:
                self._recruited_at = -RECRUIT_S
            kind.wanted = wanted.get(device, 0)
            if kind.wanted:
                kind.needed_at = time.monotonic()

    def _recruit(self) -> None:
        """Start the profilers that have work, and end those that are too many."""
        if time.monotonic() - self._recruited_at < RECRUIT_S:
            return
        self._recruited_at = time.monotonic()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        for device, kind in self._kinds.items():
            place = replace(placement(device), avoided=kind.avoided)
            if place.gpus:
                kind.room = place.room(nodes)
                self._recruit_on_gpus(device, place, nodes)
            elif kind.wanted and not kind.is_refused:
                self._recruit_on_hosts(device, place, nodes)

    def _recruit_on_gpus(self, device: str, where: Placement, nodes: Sequence[Any]) -> None:
        """Let as many profilers wait for GPUs as have work; Ray finds the GPUs."""
        kind = self._kinds[device]
        wanted = kind.wanted if self.may_grow else min(kind.wanted, kind.room)
        joining = [r for r, profiler in self._joining.items() if profiler.device == device]
        missing = wanted - self._count(device)
        if any(map(where.suits, nodes)) and wanted and not kind.room and not kind.is_told:
            kind.is_told = True
            self.tell(no_room(device, where, nodes))
        if not kind.is_refused:
            for _ in range(missing - len(joining)):
                self._start_profiler(device, where.options, None)
        for reference in joining[max(missing, 0) :]:  # so that no node is started for nothing
            ray.kill(self._joining.pop(reference).actor)
        is_needed = time.monotonic() - kind.needed_at <= RELEASE_S
        if self.may_grow:
            self._release_idle(device, self._count(device) - (kind.at_most if is_needed else 0))

    def _count(self, device: str) -> int:
        """Return the number of profilers of a device that have joined."""
        return sum(profiler.device == device for profiler in self._profilers.values())

    def _release_idle(self, device: str, count: int) -> None:
        """Give GPUs back that have no work, or that are for another campaign."""
        needed = {worker.name for worker, _, _ in self._running.values()} | self._set_aside
        idle = [n for n, p in self._profilers.items() if p.device == device and n not in needed]
        for name in idle[: max(count, 0)]:
            ray.kill(self._profilers.pop(name).actor)

    def _recruit_on_hosts(self, device: str, where: Placement, nodes: Sequence[Any]) -> None:
        everybody = [*self._profilers.values(), *self._joining.values()]
        taken = {profiler.node_id for profiler in everybody if profiler.device == device}
        for node in nodes:
            node_id = node["NodeID"]
            if where.suits(node) and node_id not in taken:
                self._start_profiler(device, node_options(node_id), node_id)

    def _start_profiler(self, device: str, options: dict[str, Any], node_id: str | None) -> None:
        # A second thread holds the call that ends with the actor.
        actor = self._class.options(max_concurrency=2, **options).remote(device)
        self._joining[actor.describe.remote()] = _Profiler(actor, device, node_id)

    def _welcome(self, reference: Any) -> None:
        """Take a profiler among the workers that has described itself, or report its failure."""
        profiler = self._joining[reference]
        try:
            facts = ray.get(reference)
        except RayError as error:  # it ended before it joined, or could not describe itself
            ray.kill(self._joining.pop(reference).actor)
            self._note_failed_start(profiler.device, error)
            return
        name = facts.get("host_name", facts["host"])  # earlier versions report neither
        refusal = code_refusal(name, facts.get("code"), this_code()) or facts.get("refusal")
        if refusal:
            if not self.may_grow:
                raise DeviceError(refusal)
            del self._joining[reference]
            ray.kill(profiler.actor)
            kind = self._kinds[profiler.device]
            is_known = facts["host"] in kind.avoided
            kind.excluded[facts["host"]] = time.monotonic() + EXCLUDED_S
            if is_known:
                return
            self.tell(
                f"{profiler.device}: a node cannot measure; it is tried again in "
                f"{EXCLUDED_S / 60:.0f} minutes: {refusal}"
            )
            return
        name = "-".join([profiler.device, facts["host"][-8:], *facts["gpus"]])
        if name in self._profilers:
            # Its predecessor has ended, which has not been noticed yet; another one is started.
            ray.kill(self._joining.pop(reference).actor)
            return
        del self._joining[reference]
        self._kinds[profiler.device].failed_starts = 0
        profiler.node_id, profiler.process = facts["host"], facts["process"]
        profiler.worker = Worker(name, profiler.device, facts["host"], facts["fingerprint"])
        self._profilers[name] = profiler
        self._alive[profiler.actor.stay.remote()] = profiler

    def _note_failed_start(self, device: str, error: RayError) -> None:
        """Pause before the next profiler, longer after each failure in a row.

        Raises:
            DeviceError: It has failed `STARTS` times, and no other node can join.
        """
        kind = self._kinds[device]
        if kind.is_refused:
            return  # it was started with one that has failed, for the same reason
        kind.failed_starts += 1
        why = last_line(error)
        if kind.failed_starts == STARTS and not self.may_grow:
            raise DeviceError(f"the profiler of {device} cannot be started: {why}")
        pause_s = pause_after(kind.failed_starts)
        kind.refused_until = time.monotonic() + pause_s
        self.tell(
            f"{device}: a profiler ended before it could measure ({why}); "
            f"the next one is started in {pause_s:.0f} s"
        )

    def dismiss(self, worker: Worker) -> None:
        """End a worker that does not respond, and its task; another may join in its place."""
        profiler = self._profilers.pop(worker.name, None)
        if profiler is not None:
            ray.kill(profiler.actor)
            # Ray waits forever for the end of a stopped process, and keeps its GPU.
            kill = ray.remote(kill_process).options(**node_options(worker.host), max_retries=0)
            kill.remote(*profiler.process)
        self._running = {r: task for r, task in self._running.items() if task[0] is not worker}

    def close(self) -> None:
        """End all profilers, so that others get their GPUs at once."""
        for profiler in [*self._profilers.values(), *self._joining.values()]:
            ray.kill(profiler.actor)
        self._profilers.clear()
        self._joining.clear()

    # Tasks.

    def start(self, worker: Worker, task: Task, protocol: MeasuringProtocol) -> None:
        actor = self._profilers[worker.name].actor
        reference = actor.measure.remote(task.configuration, protocol, task.attempt_key)
        limit = time.monotonic() + protocol.timeout_s + HUNG_S
        self._running[reference] = (worker, task, limit)

    def list_running(self) -> Sequence[tuple[Worker, Task]]:
        return [(worker, task) for worker, task, _ in self._running.values()]

    def wait(self, timeout_s: float) -> Sequence[Finished]:
        """Return what has finished, as soon as something has.

        Raises:
            DeviceError: A device cannot measure, and no other node can join. What has finished is
                left to `collect`.
        """
        awaited = [*self._running, *self._joining, *self._alive]
        if not awaited:
            time.sleep(min(timeout_s, POLL_S))
            return []
        ray.wait(awaited, timeout=timeout_s)  # for the first one
        ready, _ = ray.wait(awaited, num_returns=len(awaited), timeout=0)
        self._take_results()
        for reference in ready:
            if reference in self._joining:
                self._welcome(reference)
        for reference in ready:
            if reference in self._alive:
                self._remove(self._alive.pop(reference))
        self._dismiss_hung()
        return self.collect()

    def collect(self) -> list[Finished]:
        """Return what has finished, without waiting."""
        self._take_results()
        finished, self._finished = self._finished, []
        return finished

    def _take_results(self) -> None:
        running = list(self._running)
        ready = ray.wait(running, num_returns=len(running), timeout=0)[0] if running else []
        self._finished += [self._collect(reference) for reference in ready]

    def _remove(self, profiler: _Profiler) -> None:
        """Remove a profiler whose process has ended while it had nothing to do."""
        worker = profiler.worker
        is_busy = any(worker is busy for busy, _, _ in self._running.values())
        if worker is not None and not is_busy and self._profilers.get(worker.name) is profiler:
            del self._profilers[worker.name]

    def _dismiss_hung(self) -> None:
        """Dismiss the profilers whose task is beyond its time limit."""
        now = time.monotonic()
        hung = [(worker, task) for worker, task, limit in self._running.values() if now > limit]
        for worker, _ in hung:
            self.dismiss(worker)
            self.tell(f"{worker.device}  {worker.name} was dismissed: it does not answer")
        why = "the profiler has not answered within its time limit"
        self._finished += [Finished(worker, task, None, why) for worker, task in hung]

    def _collect(self, reference: Any) -> Finished:
        worker, task, _ = self._running.pop(reference)
        try:
            return Finished(worker, task, ray.get(reference))
        except RayTaskError as error:
            return Finished(worker, task, None, f"the profiler failed: {error.cause}")
        except RayError as error:
            self.dismiss(worker)  # if only its reply was lost, it still measures
            why = f"the profiler was lost: {first_line(error)}"
            return Finished(worker, task, None, why, is_lost=True)


def pause_after(failures: int) -> float:
    """Return the pause in seconds after this number of failed starts in a row."""
    return min(RECRUIT_S * 2.0 ** min(failures, 10), REFUSED_S)
