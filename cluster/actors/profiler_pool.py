"""A campaign's workers as Ray actors.

A worker that dies is news, not the end. Ray neither starts its actor again nor repeats its
measurement: another profiler is recruited, and the campaign decides what it measures.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    RayActorError,
    RayError,
    RayTaskError,
)

from trappm.cluster.actors.profile_tasks import profile_on_ray, trace_on_ray
from trappm.cluster.actors.profiler_actor import ProfilerActor, kill_process
from trappm.cluster.interfaces import Finished, KernelRun, Task
from trappm.cluster.placement import Placement, no_room, room_for
from trappm.cluster.profiles.static_profiles import ProfiledGraph
from trappm.cluster.profiles.step_profiles import StepKey, TracedStep
from trappm.cluster.ray_runtime import (
    first_line,
    last_line,
    on_node,
    placement,
)
from trappm.cluster.scheduler.messages import Worker
from trappm.profiler.errors import DeviceError, TrappmError
from trappm.profiler.records import Protocol as MeasuringProtocol

POLL_S = 0.2

RECRUIT_S = 1.0
"""How often the cluster is looked at for nodes that came."""

SILENT_S = 180.0
"""Seconds beyond a task's own time limit after which its profiler counts as hung."""

KERNELS_FACTOR = 3.0
"""A run of kernels may take this many times the seconds that it is given."""

RELEASE_S = 10.0
"""So long nothing must be left to do on a kind of GPU before idle ones are given back."""

REFUSED_S = 60.0
"""So long no profiler of a kind is started after one found its device out of order; and at most,
after one that could not be started."""

STARTS = 3
"""Where no other node can come, so many profilers of a kind may fail to start in a row."""

MANY = 1 << 30


@dataclass(eq=False)
class _Profiler:
    """A profiler actor; its worker is known once it has joined."""

    actor: Any
    device: str
    node_id: str | None
    """Where it was put; None: wherever Ray finds a GPU of its kind."""
    worker: Worker | None = None
    process: tuple[int, float] = (0, 0.0)
    """Its id on its node, and when it began."""


class ProfilerPool:
    """A profiler actor for each GPU of the campaign's kinds, and for each host of its CPU devices.

    The first call of `joined` recruits: GPUs that wait for profiles of the pool would cost money.
    From then on, profilers start within a second or so on nodes that join. Where the cluster may
    grow, one more profiler of each kind that has work waits for a GPU, which is what an autoscaler
    acts upon.

    Args:
        devices: what to measure on.
        may_grow: nodes that nobody sees yet may join.
        tell: called with a line of news for each node that cannot measure.
        profiler: the class of the actors.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        may_grow: bool,
        tell: Callable[[str], None] = lambda message: None,
        profiler: type[Any] = ProfilerActor,
    ) -> None:
        self._devices = devices
        self._may_grow = may_grow
        self._tell = tell
        self._refused_until: dict[str, float] = {}
        self._failed_starts: Counter[str] = Counter()
        self._offered: Counter[str] = Counter()
        self._without_room: set[str] = set()
        """Devices of which was told that others have all GPUs of their kind."""
        self._class = ray.remote(profiler)
        self._to_come: dict[str, int] = dict.fromkeys(devices, MANY)
        self._needed_at = dict.fromkeys(devices, time.monotonic())
        self._profilers: dict[str, _Profiler] = {}
        self._joining: dict[Any, _Profiler] = {}
        self._running: dict[Any, tuple[Worker, Task]] = {}
        self._deadlines: dict[Any, float] = {}
        """When a running task counts as hung."""
        self._alive: dict[Any, _Profiler] = {}
        """Calls that end with an error when their profiler does, and never otherwise."""
        self._not_begun: list[Finished] = []
        """What was given to workers that were found to be gone a moment before."""
        self._recruited_at = -RECRUIT_S

    def profile(self, pairs: Sequence[tuple[str, int]]) -> Iterator[ProfiledGraph]:
        return profile_on_ray(pairs)

    def trace(self, keys: Sequence[StepKey]) -> Iterator[TracedStep]:
        return trace_on_ray(keys)

    # Who is there.

    def joined(self) -> Sequence[Worker]:
        self._recruit()
        return [profiler.worker for profiler in self._profilers.values() if profiler.worker]

    def awaited(self) -> Sequence[str]:
        joining = [profiler.device for profiler in self._joining.values()]
        joining += [device for device in self._refused_until if self._is_refused(device)]
        there = {profiler.device for profiler in self._profilers.values()}
        absent = [device for device in self._devices if device not in there]
        return joining + (absent if self._may_grow else [])

    def want(self, to_come: Mapping[str, int]) -> None:
        self._to_come = dict(to_come)
        self._needed_at |= dict.fromkeys((d for d, n in to_come.items() if n), time.monotonic())

    def _recruit(self) -> None:
        """Starts the profilers that the cluster has room for, and no more than have work."""
        if time.monotonic() - self._recruited_at < RECRUIT_S:
            return
        self._recruited_at = time.monotonic()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        places = {device: placement(device) for device in self._devices}
        at_work = {d: place for d, place in places.items() if self._to_come.get(d, 0)}
        done = {d: place for d, place in places.items() if d not in at_work}
        self._offered = Counter(room_for(at_work, nodes) | room_for(done, nodes))
        for device, place in sorted(places.items(), key=lambda item: -item[1].gpus):
            if self._is_refused(device):
                continue
            if place.needs_gpu:
                self._recruit_on_gpus(device, place, at_work, nodes)
            else:
                self._recruit_on_hosts(device, place, nodes)

    def _recruit_on_gpus(
        self, device: str, where: Placement, at_work: Mapping[str, Placement], nodes: Sequence[Any]
    ) -> None:
        """Ray finds the GPUs: as many profilers wait as there may be free ones for."""
        there = self._count(device)
        joining = [r for r, profiler in self._joining.items() if profiler.device == device]
        wanted = self._offered[device] - there
        suited = [node for node in nodes if where.suits(node)]
        rivals = {d: place for d, place in at_work.items() if any(map(place.suits, suited))}
        waited_for = [d for d in rivals if d != device and self._is_to_come(d)]
        if not waited_for:
            wanted = max(wanted, int(self._may_grow))
        elif any(rivals[d].gpus > where.gpus for d in waited_for):
            wanted = 0  # or single GPUs would be taken of every node that ranks need whole
        wanted = max(min(wanted, self._to_come.get(device, 0)), 0)
        if suited and wanted and not self._offered[device] and device not in self._without_room:
            self._without_room.add(device)
            self._tell(no_room(device, rivals, nodes))
        for _ in range(wanted - len(joining)):
            self._start_profiler(device, where.options, None)
        for reference in joining[wanted:]:  # so that no node is started for nothing
            ray.kill(self._joining.pop(reference).actor)
        if self._may_grow and self._recruited_at - self._needed_at[device] > RELEASE_S:
            self._release_idle(device)

    def _count(self, device: str) -> int:
        return sum(profiler.device == device for profiler in self._profilers.values())

    def _is_to_come(self, device: str) -> bool:
        """Whether there is room for profilers of this device, but none yet."""
        return bool(self._offered[device]) and not (self._count(device) or self._is_refused(device))

    def _release_idle(self, device: str) -> None:
        """Gives GPUs back that nothing is left for: their nodes may go while others measure on."""
        busy = {worker.name for worker, _ in self._running.values()}
        there = [(name, p) for name, p in self._profilers.items() if p.device == device]
        for name, profiler in there:
            if name not in busy:
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
        profiler = _Profiler(actor, device, node_id)
        self._joining[actor.describe.remote()] = profiler

    def _welcome(self, reference: Any) -> None:
        profiler = self._joining[reference]
        try:
            facts = _result(reference)
        except (RayActorError, ActorUnschedulableError) as error:  # it died before it had joined
            self._note_failed_start(reference, error)
            return
        except (TrappmError, RayTaskError) as error:
            if not self._may_grow:
                raise
            self._refuse(reference, error)
            return
        name = "-".join([profiler.device, facts["host"][-8:], *facts["gpus"]])
        if name in self._profilers:
            return  # one that died there has not been noticed yet
        del self._joining[reference]
        del self._failed_starts[profiler.device]
        profiler.node_id, profiler.process = facts["host"], facts["process"]
        profiler.worker = Worker(name, profiler.device, facts["host"], facts["fingerprint"])
        self._profilers[name] = profiler
        self._alive[profiler.actor.stay.remote()] = profiler

    def _refuse(self, reference: Any, error: Exception) -> None:
        """One node that is out of order, such as by its driver, does not end what others do."""
        profiler = self._joining.pop(reference)
        ray.kill(profiler.actor)
        self._refused_until[profiler.device] = time.monotonic() + REFUSED_S
        why = error.cause if isinstance(error, RayTaskError) else error
        self._tell(f"{profiler.device}: a node cannot measure; it is tried again later: {why}")

    def _note_failed_start(self, reference: Any, error: RayError) -> None:
        """Waits longer and longer for the next one: what is not installed will not be in a second.

        Raises:
            DeviceError: on this machine alone, once it has failed often enough.
        """
        device = self._joining.pop(reference).device
        if self._is_refused(device):
            return  # others, started with one that has failed, fail alike
        self._failed_starts[device] += 1
        count, why = self._failed_starts[device], last_line(error)
        if count == STARTS and not self._may_grow:
            raise DeviceError(f"the profiler of {device} cannot be started: {why}")
        pause_s = pause_after(count)
        self._refused_until[device] = time.monotonic() + pause_s
        self._tell(
            f"{device}: a profiler ended before it could measure ({why}); "
            f"the next one is started in {pause_s:.0f} s"
        )

    def _is_refused(self, device: str) -> bool:
        return time.monotonic() < self._refused_until.get(device, 0.0)

    def dismiss(self, worker: Worker) -> None:
        """End a worker that does not answer, and what it does; another may join for it."""
        profiler = self._profilers.pop(worker.name, None)
        if profiler is not None:
            ray.kill(profiler.actor)
            # Ray waits for ever for the end of a process that stands still, and keeps its GPU.
            kill = ray.remote(kill_process).options(**on_node(worker.host), max_retries=0)
            kill.remote(*profiler.process)
        self._running = {r: what for r, what in self._running.items() if what[0] is not worker}

    # What they measure.

    def start(self, worker: Worker, task: Task, protocol: MeasuringProtocol) -> None:
        if worker.name not in self._profilers:
            self._not_begun.append(Finished(worker, task, None, "the profiler was gone already"))
            return
        actor = self._profilers[worker.name].actor
        if isinstance(task, KernelRun):
            reference, limit_s = actor.characterise.remote(task.seconds), task.seconds
            limit_s *= KERNELS_FACTOR
        else:
            reference = actor.measure.remote(task.configuration, protocol, task.attempt_key)
            limit_s = protocol.timeout_s
        self._running[reference] = (worker, task)
        self._deadlines[reference] = time.monotonic() + limit_s + SILENT_S

    def running(self) -> Sequence[tuple[Worker, Task]]:
        return list(self._running.values())

    def wait(self, timeout_s: float) -> Sequence[Finished]:
        if self._not_begun:
            finished, self._not_begun = self._not_begun, []
            return finished
        awaited = [*self._running, *self._joining, *self._alive]
        if not awaited:
            time.sleep(min(timeout_s, POLL_S))
            return []
        ready = _ready(awaited)
        if not ready:
            ray.wait(awaited, timeout=timeout_s)
            ready = _ready(awaited)
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
        is_busy = any(worker is busy for busy, _ in self._running.values())
        if worker is not None and not is_busy and self._profilers.get(worker.name) is profiler:
            del self._profilers[worker.name]

    def _dismiss_hung(self) -> list[Finished]:
        """Dismiss the profilers whose task is beyond its time limit."""
        now = time.monotonic()
        hung = [r for r in self._running if now > self._deadlines[r]]
        finished = []
        for reference in hung:
            worker, task = self._running[reference]
            del self._deadlines[reference]
            self.dismiss(worker)
            self._tell(f"{worker.device}  {worker.name} was dismissed: it does not answer")
            why = "the profiler has not answered within its time limit"
            finished.append(Finished(worker, task, None, why))
        return finished

    def _collect(self, reference: Any) -> Finished:
        worker, task = self._running.pop(reference)
        del self._deadlines[reference]
        try:
            if isinstance(task, KernelRun):
                kernels, why = ray.get(reference)
                return Finished(worker, task, None, why, kernels)
            return Finished(worker, task, ray.get(reference))
        except RayTaskError as error:
            return Finished(worker, task, None, f"the profiler failed: {error.cause}")
        except RayError as error:
            profiler = self._profilers.pop(worker.name, None)
            if profiler is not None:
                ray.kill(profiler.actor)  # if only its answer was lost
            return Finished(worker, task, None, f"the profiler died: {first_line(error)}")


def pause_after(failures: int) -> float:
    """Seconds until another profiler is started after so many in a row that could not be."""
    return min(RECRUIT_S * 2.0 ** min(failures, 10), REFUSED_S)


def _ready(references: Sequence[Any]) -> Sequence[Any]:
    """Those whose results, or failures, are there by now."""
    ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
    return list(ready)


def _result(reference: Any) -> Any:
    """The result of an actor's call; our own errors come out as they are."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, TrappmError):
            raise error.cause from error
        raise
