"""Starting Ray on this machine or joining a cluster, and placing actors on its nodes.

The module wraps Ray's beta or unusual features, one function per feature. Ray reads its
authentication token from the environment once, when it is imported: so this module imports it late,
and modules with actors must be imported inside `ray_runtime`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trappm.cluster.spec import ANY_GPU, runs_nothing
from trappm.profiler.devices import local_devices
from trappm.profiler.devices.catalogue import rank_key, ray_labels
from trappm.profiler.errors import CampaignError, DeviceError
from trappm.profiler.records import is_cpu_device

CPU_LABEL = "trappm/cpu-device"
"""Label of nodes whose cores are set aside for measuring CPU devices."""

ACCELERATOR_LABEL = "ray.io/accelerator-type"

NODE_LABEL = "ray.io/node-id"

NAMESPACE = "trappm"

CAMPAIGN_ACTOR = "campaign-"
"""Begins the names of campaigns' actors on a cluster; the campaign's id follows."""

_CORE_SHARE = 0.001
"""CPU request that makes Ray respect a soft affinity: actors with 0 CPUs start on a random node."""
START_TRIES = 3

_FOLDER_PREFIX = "trappm-ray-"
_MAX_TEMPORARY_BYTES = 9


@dataclass(frozen=True)
class Placement:
    """Nodes that have a device, and Ray options that put a profiler actor on one of them."""

    labels: Mapping[str, tuple[str, ...]]
    """Accepted values of node labels by name, the usual one first."""
    gpus: int
    """Number of a node's GPUs that a profiler uses."""
    avoided: frozenset[str] = frozenset()
    """Ids of nodes that are excluded."""

    @property
    def options(self) -> dict[str, Any]:
        # With a core per profiler, nodes of few cores would leave GPUs idle.
        gpu = {"num_gpus": self.gpus} if self.gpus else {}
        selector = {
            name: values[0] if len(values) == 1 else f"in({','.join(values)})"
            for name, values in self.labels.items()
        }
        if self.avoided:
            selector[NODE_LABEL] = f"!in({','.join(sorted(self.avoided))})"
        return {**gpu, "num_cpus": 0, "label_selector": selector}

    def suits(self, node: Mapping[str, Any]) -> bool:
        """Return whether a node of `ray.nodes` has the device, and is not excluded."""
        labels = node.get("Labels", {})
        return node.get("NodeID") not in self.avoided and all(
            labels.get(name) in values for name, values in self.labels.items()
        )

    def room(self, nodes: Sequence[Mapping[str, Any]]) -> int:
        """Return how many profilers on GPUs nodes of `ray.nodes` have room for."""
        gpus = (int(node["Resources"].get("GPU", 0)) for node in nodes if self.suits(node))
        return sum(count // self.gpus for count in gpus)


def no_room(device: str, where: Placement, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return why there is no room for a device, and what to do about it."""
    gpus = [int(n["Resources"].get("GPU", 0)) for n in nodes if where.suits(n)]
    return (
        f"no node has room for {device} (GPUs: {where.gpus}): those of its kind have "
        f"{', '.join(map(str, gpus)) or 'none'}; start another node"
    )


def placement(device: str) -> Placement:
    """Return where profilers of a device are put.

    Simulated and replayed devices stay on this node, where their files are. If a node has the real
    GPU, the simulated one takes its place, so that a campaign can be rehearsed on a cluster.
    """
    if device.startswith("simulated:"):
        real = placement(device.removeprefix("simulated:"))
        if any(real.suits(node) for node in _nodes()):
            return real
    if runs_nothing(device):
        return Placement({NODE_LABEL: (_this_node(),)}, gpus=0)
    if is_cpu_device(device):
        return Placement({CPU_LABEL: ("true",)}, gpus=0)
    key = rank_key(device)
    return Placement({ACCELERATOR_LABEL: ray_labels(key.member)}, gpus=key.ranks)


def this_node_options(*, soft: bool = False) -> dict[str, Any]:
    """Return Ray options that put an actor on the caller's node."""
    return node_options(_this_node(), soft=soft)


def node_options(node_id: str, *, soft: bool = False) -> dict[str, Any]:
    """Return Ray options that put an actor or a task on a node, even if it is busy.

    Once the node is gone it fails, or starts elsewhere if `soft`. With a label selector it would
    wait forever, and `ray status` would show its demand.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=soft)
    num_cpus = 0.0
    if soft and any(n["NodeID"] == node_id and n["Resources"].get("CPU") for n in _nodes()):
        num_cpus = _CORE_SHARE  # an actor that needs nothing may start on a random node
    return {"num_cpus": num_cpus, "scheduling_strategy": strategy}


def learner_options(device: str | None, memory_bytes: int) -> dict[str, Any]:
    """Return Ray options that put a learner on the caller's node, or on one that has a GPU for it.

    Args:
        device: Key of the GPU, `ANY_GPU`, or None for the caller's node.
        memory_bytes: Memory that it needs; it requests no more than such a node offers.
    """
    if device is None:
        nodes, options = [n for n in _nodes() if n["NodeID"] == _this_node()], this_node_options()
    else:
        place = Placement({}, gpus=1) if device == ANY_GPU else placement(device)
        nodes, options = [n for n in _nodes() if place.room([n])], place.options
    offers = [int(node["Resources"].get("memory", memory_bytes)) for node in nodes]
    return {**options, "memory": min(memory_bytes, max(offers, default=memory_bytes))}


def tracing_options(devices: Sequence[str], refused: Collection[str] = ()) -> dict[str, Any]:
    """Return Ray options that keep a task of one core off nodes with these devices, if it can.

    It would disturb measurements there, and make an autoscaler start a GPU node. Nodes that join
    later are taken, too, and where no others are, the task runs on any node that is not refused.

    Args:
        devices: Keys of devices.
        refused: Ids of nodes that cannot run the task.
    """
    anywhere = {NODE_LABEL: f"!in({','.join(sorted(refused))})"} if refused else {}
    elsewhere = {
        name: f"!in({','.join(values)})" for name, values in _measuring_labels(devices).items()
    }
    if not elsewhere:
        return {"label_selector": anywhere} if anywhere else {}
    return {
        "label_selector": elsewhere | anywhere,
        "fallback_strategy": [{"label_selector": anywhere}],
    }


def nodes_at(ip: str) -> set[str]:
    """Return the ids of the nodes with an address."""
    return {node["NodeID"] for node in _nodes() if node["NodeManagerAddress"] == ip}


def can_run_elsewhere(refused: Collection[str]) -> bool:
    """Return whether a node that is not refused has a core."""
    return any(n["NodeID"] not in refused and n["Resources"].get("CPU", 0) >= 1 for n in _nodes())


def has_other_nodes(devices: Sequence[str]) -> bool:
    """Return whether there is a node with a core and without these devices."""
    measuring = _measuring_labels(devices)
    return any(
        node["Resources"].get("CPU", 0) >= 1
        and not any(node.get("Labels", {}).get(n) in values for n, values in measuring.items())
        for node in _nodes()
    )


def _measuring_labels(devices: Sequence[str]) -> dict[str, list[str]]:
    """Return the label values of nodes that measure, by label; without devices, all of GPUs."""
    values = defaultdict[str, set[str]](set)
    for place in map(placement, devices):
        for name, accepted in place.labels.items():
            if name != NODE_LABEL:
                values[name].update(accepted)
    if not devices:
        offered = (node.get("Labels", {}).get(ACCELERATOR_LABEL) for node in _nodes())
        values[ACCELERATOR_LABEL].update(filter(None, offered))
    return {name: sorted(accepted) for name, accepted in values.items() if accepted}


def first_line(error: BaseException) -> str:
    """Return the first line of a Ray error, without the pages that follow."""
    return str(error).strip().splitlines()[0]


def last_line(error: BaseException) -> str:
    """Return why an actor ended: the last line of Ray's error, or its class if it is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip().removesuffix(".")


def _this_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def require_nodes(devices: tuple[str, ...]) -> None:
    """Raise DeviceError for a device that no node offers.

    Without this check, Ray would let an actor that no node can run wait forever.
    """
    nodes = _nodes()
    places = {device: placement(device) for device in devices if not runs_nothing(device)}
    for device, place in places.items():
        if any(place.suits(node) for node in nodes):
            if place.gpus and not place.room(nodes):
                raise DeviceError(no_room(device, place, nodes))
            continue
        ((key, (value, *_)),) = place.labels.items()
        have = sorted({node["Labels"][key] for node in nodes if key in node.get("Labels", {})})
        offer = f"the nodes offer {', '.join(have)}" if have else "no node has such a label"
        raise DeviceError(
            f"no node for device {device!r}: it needs the label {key}={value}, and {offer}; "
            f"start one with: ray start --address=HEAD:6379 --labels {key}={value}"
        )


def list_gpus(address: str) -> set[str]:
    """Return keys of the GPUs that a cluster's nodes have, and of all that Ray knows by name.

    Raises:
        CampaignError: The cluster cannot be reached.
    """
    with ray_runtime(address):
        from ray.util.accelerators import accelerators

        offered = [node.get("Labels", {}).get(ACCELERATOR_LABEL) for node in _nodes()]
        names = [value for key, value in vars(accelerators).items() if not key.startswith("_")]
    return {name.lower() for name in (*offered, *names) if isinstance(name, str)}


@contextlib.contextmanager
def ray_runtime(address: str | None) -> Iterator[None]:
    """Run the block with Ray: a private local one, or a cluster at `address`.

    Raises:
        CampaignError: Ray cannot be started or reached.
    """
    _set_environment(is_private=address is None)
    with _hold_interrupts():
        import ray

    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    folder = None
    if address is None:
        _remove_leftovers()
        folder = tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir=_temporary())
        options |= {
            "num_cpus": os.cpu_count(),
            **_local_devices(),
            "include_dashboard": False,
            "object_store_memory": 200 << 20,
            # Ray's folder is writable by all users, so it is put into a private one.
            "_temp_dir": f"{folder}/r",
        }
    try:
        _init(address, options)
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Let a Ctrl-C in the block interrupt at its end.

    Compiled modules print an interruption of their import and go on, so it would be lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)


def _set_environment(*, is_private: bool) -> None:
    """Set what Ray reads from the environment when it is imported, here and in its processes."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray lowers the priority of its workers, and so of measurements.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if is_private:
        # Running out of memory is an outcome of a measurement, but Ray's memory monitor would kill
        # the profiler. Without it the kernel kills Ray's workers (oom_score_adj 1000) before the
        # services that Ray needs.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    if is_private and "ray" not in sys.modules:
        # The private Ray serves this process tree only, and leaves no token file.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray listens on loopback only, its metrics included, which no token protects.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def _init(address: str | None, options: Mapping[str, Any]) -> None:
    import ray

    # On a machine that is very busy a local Ray may not be up in the half minute that it has.
    for tries_to_come in reversed(range(1 if address else START_TRIES)):
        try:
            ray.init(address=address or "local", **options)
            return
        except Exception as error:  # Ray raises anything here, of no class of its own
            ray.shutdown()
            if not tries_to_come:
                where = f"the Ray cluster at {address!r}" if address else "a local Ray"
                raise CampaignError(f"cannot start or reach {where}: {error}") from error


def _local_devices() -> dict[str, Any]:
    """Return Ray options that offer the devices of this machine: its cores, its GPUs by name."""
    gpus = [key for key in local_devices() if not is_cpu_device(key) and ":" not in key]
    if not gpus:
        return {"num_gpus": 0, "labels": {CPU_LABEL: "true"}}
    return {"labels": {CPU_LABEL: "true", ACCELERATOR_LABEL: gpus[0].upper()}}


def _temporary() -> Path:
    """Return the folder of temporary files, or a shorter one.

    Paths of sockets may have 103 bytes (on Linux 107), of which Ray needs 94.
    """
    usual = Path(tempfile.gettempdir())
    return usual if len(bytes(usual)) <= _MAX_TEMPORARY_BYTES else Path("/tmp")  # noqa: S108  # ours is 0700


def _kill_holders(folder: Path) -> None:
    """Kill the processes that hold files open in a folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if any(file.path.startswith(f"{folder}/") for file in process.open_files()):
                process.kill()


def _remove_leftovers() -> None:
    """Remove what the private Rays of this user's killed programs left: folders and agents."""
    for folder in _temporary().glob(f"{_FOLDER_PREFIX}*"):
        pid = folder.name.removeprefix(_FOLDER_PREFIX).split("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another program removes it, too
            is_own = folder.lstat().st_uid == os.getuid()
            if is_own and pid.isdigit() and not psutil.pid_exists(int(pid)):
                _kill_holders(folder)
                shutil.rmtree(folder, ignore_errors=True)
