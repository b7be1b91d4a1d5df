"""A campaign's workers as Ray actors, one per device of a node.

A worker that ends is an event, not an error. Ray neither starts its actor again nor repeats its
measurement: another profiler is recruited, and the campaign decides what it measures.

Import this module inside `with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError, RayTaskError

from trappm.cluster.profiles import Traced, trace_on_ray
from trappm.cluster.ray_runtime import (
    Placement,
    first_line,
    last_line,
    no_room,
    off_measuring_nodes,
    on_node,
    placement,
    room_for,
)
from trappm.cluster.scheduler.messages import Finished, Task, Worker
from trappm.profiler.errors import DeviceError, one_line
from trappm.profiler.records import Configuration, Measurement, is_cpu_device
from trappm.profiler.records import Protocol as MeasuringProtocol
from trappm.profiler.trace_cache import TraceKey

POLL_S = 0.2

RECRUIT_S = 1.0
"""Period of the checks for new nodes."""

SILENT_S = 180.0
"""Seconds beyond a task's own time limit after which its profiler counts as hung."""

RELEASE_S = 10.0
"""Seconds without work after which idle GPUs of a kind are given back."""

REFUSED_S = 60.0
"""Longest pause before the next profiler of a kind after failed starts."""

EXCLUDED_S = 660.0
"""Seconds for which no profiler of a kind is started on a node where its device is faulty: a minute
more than an autoscaler with our files leaves a node idle."""

SET_ASIDE_S = 3600.0
"""Seconds after which a device that failed its checks is looked at again."""

NODE_WORK_S = 600.0
"""Work on each GPU from which on another one is asked for: its node takes minutes to start."""

MOST_ASKED = 16
"""Largest number of GPUs of a kind that are asked for at once."""

MEAN_S = 6.0
"""Duration of a measurement before one has ended; that of our H100."""

LOCK_S = 60.0
"""Longest wait for another measurement on a GPU; Ray gives each GPU to one profiler."""

STARTS = 3
"""Number of failed starts in a row that end a campaign where no other node can join."""

MANY = 1 << 30


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
        """Return host, process, GPUs given by Ray, and fingerprint of the software stack.

        The `refusal` is the reason if it cannot measure here.
        """
        from trappm.profiler.devices import open_device
        from trappm.profiler.host.environment import stack_fingerprint

        facts = {
            "host": ray.get_runtime_context().get_node_id(),
            "process": this_process(),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
        }
        try:
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


def this_process() -> tuple[int, float]:
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

    to_come: int = MANY
    """Number of assignments that are still to begin."""
    mean_s: float = MEAN_S
    """Mean duration of a measurement."""
    needed_at: float = field(default_factory=time.monotonic)
    """Time at which there was work last."""
    refused_until: float = 0.0
    failed_starts: int = 0
    excluded: dict[str, float] = field(default_factory=dict)
    """Nodes where no profiler is started, and the times until which that holds."""
    room: int = 0
    """Number of profilers that the cluster's GPUs have room for, excluded nodes left out."""
    is_told: bool = False
    """True if it was reported that others have all GPUs of its kind."""

    @property
    def is_refused(self) -> bool:
        return time.monotonic() < self.refused_until

    @property
    def avoided(self) -> frozenset[str]:
        now = time.monotonic()
        return frozenset(node_id for node_id, until in self.excluded.items() if now < until)


@dataclass(eq=False)
class ProfilerPool:
    """A profiler actor for each GPU of the campaign's kinds, and for each host of its CPU devices.

    The first call of `joined` recruits: idle GPUs cost money while the pool is profiled. From then
    on, profilers start within a second or so on nodes that join. Where the cluster may grow, as
    many profilers wait for a GPU as a kind's work needs, which makes an autoscaler act.

    A device that is faulty gives its GPU back, and its node gets no new profiler of that kind for
    some time; profilers on the node's other GPUs continue.
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
        self._not_begun: list[Finished] = []
        """Tasks that were given to workers which had just ended."""
        self._recruited_at = -RECRUIT_S

    def trace(self, keys: Sequence[TraceKey]) -> Iterator[Traced]:
        """Yield traced steps in the order of completion."""
        return trace_on_ray(keys)

    @property
    def traces_elsewhere(self) -> bool:
        """Return whether steps are traced on nodes that do not measure."""
        return self.may_grow and bool(off_measuring_nodes())

    # Workers.

    def joined(self) -> Sequence[Worker]:
        """Return the workers that have joined."""
        self._recruit()
        return [profiler.worker for profiler in self._profilers.values() if profiler.worker]

    def awaited(self) -> Sequence[str]:
        """Return devices whose workers may still join."""
        joining = [profiler.device for profiler in self._joining.values()]
        joining += [device for device, kind in self._kinds.items() if kind.is_refused]
        absent = [device for device in self._kinds if not self._count(device)]
        return joining + (absent if self.may_grow else [])

    def want(self, to_come: Mapping[str, int], mean_s: Mapping[str, float]) -> None:
        """Announce by device how many measurements are to begin, and how long each takes.

        At 0, no worker need join.
        """
        for device, kind in self._kinds.items():
            kind.to_come = to_come.get(device, 0)
            kind.mean_s = mean_s.get(device, MEAN_S)
            if kind.to_come:
                kind.needed_at = time.monotonic()

    def _recruit(self) -> None:
        """Start the profilers that have work and for which the cluster has room."""
        if time.monotonic() - self._recruited_at < RECRUIT_S:
            return
        self._recruited_at = time.monotonic()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        places = {
            device: replace(placement(device), avoided=kind.avoided)
            for device, kind in self._kinds.items()
        }
        at_work = {d: place for d, place in places.items() if self._kinds[d].to_come}
        for device, room in room_for(at_work, nodes).items():
            self._kinds[device].room = room
        for device, place in sorted(places.items(), key=lambda item: -item[1].gpus):
            if self._kinds[device].is_refused:
                continue
            if place.gpus:
                self._recruit_on_gpus(device, place, at_work, nodes)
            else:
                self._recruit_on_hosts(device, place, nodes)

    def _recruit_on_gpus(
        self, device: str, where: Placement, at_work: Mapping[str, Placement], nodes: Sequence[Any]
    ) -> None:
        """Let as many profilers wait as there may be free GPUs for; Ray finds the GPUs."""
        kind = self._kinds[device]
        joining = [r for r, profiler in self._joining.items() if profiler.device == device]
        wanted = kind.room - self._count(device, where.avoided)
        suited = [node for node in nodes if where.suits(node)]
        rivals = {d: place for d, place in at_work.items() if any(map(place.suits, suited))}
        waited_for = [d for d in rivals if d != device and self._is_to_come(d)]
        if not waited_for:
            if self.may_grow:
                needed = math.ceil(kind.to_come * kind.mean_s / NODE_WORK_S)
                wanted = max(wanted, min(needed - self._count(device), MOST_ASKED))
        elif any(rivals[d].gpus > where.gpus for d in waited_for):
            wanted = 0  # single GPUs would be taken of every node that ranks need whole
        wanted = max(min(wanted, kind.to_come), 0)
        if suited and wanted and not kind.room and not kind.is_told:
            kind.is_told = True
            self.tell(no_room(device, rivals, nodes))
        for _ in range(wanted - len(joining)):
            self._start_profiler(device, where.options, None)
        for reference in joining[wanted:]:  # so that no node is started for nothing
            ray.kill(self._joining.pop(reference).actor)
        if self.may_grow and self._recruited_at - kind.needed_at > RELEASE_S:
            self._release_idle(device)

    def _count(self, device: str, avoided: Collection[str] = ()) -> int:
        """Return the number of profilers of a device, except those on some nodes."""
        return sum(
            p.device == device and p.node_id not in avoided for p in self._profilers.values()
        )

    def _is_to_come(self, device: str) -> bool:
        """Return whether there is room for profilers of this device, but none yet."""
        kind = self._kinds[device]
        return bool(kind.room) and not (self._count(device) or kind.is_refused)

    def _release_idle(self, device: str) -> None:
        """Give GPUs without work back: their nodes may go while others measure on."""
        busy = {worker.name for worker, _, _ in self._running.values()}
        for name, profiler in list(self._profilers.items()):
            if profiler.device == device and name not in busy:
                del self._profilers[name]
                ray.kill(profiler.actor)

    def _recruit_on_hosts(self, device: str, where: Placement, nodes: Sequence[Any]) -> None:
        everybody = [*self._profilers.values(), *self._joining.values()]
        taken = {profiler.node_id for profiler in everybody if profiler.device == device}
        for node in nodes:
            node_id = node["NodeID"]
            if where.suits(node) and node_id not in taken:
                self._start_profiler(device, on_node(node_id), node_id)

    def _start_profiler(self, device: str, options: dict[str, Any], node_id: str | None) -> None:
        # A second thread holds the call that ends with the actor.
        actor = self._class.options(max_concurrency=2, **options).remote(device)
        self._joining[actor.describe.remote()] = _Profiler(actor, device, node_id)

    def _welcome(self, reference: Any) -> None:
        """Take a profiler among the workers that has described itself, or report its failure."""
        profiler = self._joining[reference]
        try:
            facts = ray.get(reference)
        except (RayActorError, ActorUnschedulableError) as error:  # it ended before it joined
            del self._joining[reference]
            self._note_failed_start(profiler.device, error)
            return
        if refusal := facts.get("refusal"):
            if not self.may_grow:
                raise DeviceError(refusal)
            del self._joining[reference]
            ray.kill(profiler.actor)
            self._exclude(profiler.device, facts["host"], EXCLUDED_S)
            self.tell(
                f"{profiler.device}: a node cannot measure; it is tried again in "
                f"{EXCLUDED_S / 60:.0f} minutes: {refusal}"
            )
            return
        name = "-".join([profiler.device, facts["host"][-8:], *facts["gpus"]])
        if name in self._profilers:
            return  # its predecessor has ended, which has not been noticed yet
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

    def _exclude(self, device: str, node_id: str, seconds: float) -> None:
        """Start no profiler of a device on a node for some time."""
        self._kinds[device].excluded[node_id] = time.monotonic() + seconds
        for reference, profiler in list(self._joining.items()):
            if profiler.device == device:  # Ray might put it there; another one is started
                ray.kill(self._joining.pop(reference).actor)

    def set_aside(self, worker: Worker) -> None:
        """End a worker whose device failed its checks; it may join again after `SET_ASIDE_S`."""
        self._exclude(worker.device, worker.host, SET_ASIDE_S)
        self.dismiss(worker)

    def dismiss(self, worker: Worker) -> None:
        """End a worker that does not respond, and its task; another may join in its place."""
        profiler = self._profilers.pop(worker.name, None)
        if profiler is not None:
            ray.kill(profiler.actor)
            # Ray waits forever for the end of a stopped process, and keeps its GPU.
            kill = ray.remote(kill_process).options(**on_node(worker.host), max_retries=0)
            kill.remote(*profiler.process)
        self._running = {r: task for r, task in self._running.items() if task[0] is not worker}

    # Tasks.

    def start(self, worker: Worker, task: Task, protocol: MeasuringProtocol) -> None:
        if worker.name not in self._profilers:
            self._not_begun.append(Finished(worker, task, None, "the profiler was gone already"))
            return
        actor = self._profilers[worker.name].actor
        reference = actor.measure.remote(task.configuration, protocol, task.attempt_key)
        limit = time.monotonic() + protocol.timeout_s + SILENT_S
        self._running[reference] = (worker, task, limit)

    def running(self) -> Sequence[tuple[Worker, Task]]:
        return [(worker, task) for worker, task, _ in self._running.values()]

    def wait(self, timeout_s: float) -> Sequence[Finished]:
        """Return what has finished, as soon as something has."""
        if self._not_begun:
            finished, self._not_begun = self._not_begun, []
            return finished
        awaited = [*self._running, *self._joining, *self._alive]
        if not awaited:
            time.sleep(min(timeout_s, POLL_S))
            return []
        ray.wait(awaited, timeout=timeout_s)  # for the first one
        ready, _ = ray.wait(awaited, num_returns=len(awaited), timeout=0)
        for reference in ready:
            if reference in self._joining:
                self._welcome(reference)
        finished = [self._collect(reference) for reference in ready if reference in self._running]
        for reference in ready:
            if reference in self._alive:
                self._remove(self._alive.pop(reference))
        return finished + self._dismiss_hung()

    def _remove(self, profiler: _Profiler) -> None:
        """Remove a profiler whose process has ended while it had nothing to do."""
        worker = profiler.worker
        is_busy = any(worker is busy for busy, _, _ in self._running.values())
        if worker is not None and not is_busy and self._profilers.get(worker.name) is profiler:
            del self._profilers[worker.name]

    def _dismiss_hung(self) -> list[Finished]:
        """Dismiss the profilers whose task is beyond its time limit."""
        now = time.monotonic()
        hung = [(worker, task) for worker, task, limit in self._running.values() if now > limit]
        for worker, _ in hung:
            self.dismiss(worker)
            self.tell(f"{worker.device}  {worker.name} was dismissed: it does not answer")
        why = "the profiler has not answered within its time limit"
        return [Finished(worker, task, None, why) for worker, task in hung]

    def _collect(self, reference: Any) -> Finished:
        worker, task, _ = self._running.pop(reference)
        try:
            return Finished(worker, task, ray.get(reference))
        except RayTaskError as error:
            return Finished(worker, task, None, f"the profiler failed: {error.cause}")
        except RayError as error:
            profiler = self._profilers.pop(worker.name, None)
            if profiler is not None:
                ray.kill(profiler.actor)  # if only its reply was lost
            return Finished(worker, task, None, f"the profiler crashed: {first_line(error)}")


def pause_after(failures: int) -> float:
    """Return the pause in seconds after this number of failed starts in a row."""
    return min(RECRUIT_S * 2.0 ** min(failures, 10), REFUSED_S)
