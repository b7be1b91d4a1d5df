"""Which nodes have a device, and how many profilers of each device they have room for at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Placement:
    """Which nodes have a device, and the Ray options that put a profiler actor on one of them."""

    labels: Mapping[str, tuple[str, ...]]
    """By name: the values that will do, the usual one first."""
    gpus: int
    """How many of a node's GPUs a profiler has."""

    @property
    def needs_gpu(self) -> bool:
        return self.gpus > 0

    @property
    def options(self) -> dict[str, Any]:
        # No core: Ray would want one for each GPU, and leave GPUs idle for lack of it.
        gpu = {"num_gpus": self.gpus} if self.needs_gpu else {}
        selector = {
            name: values[0] if len(values) == 1 else f"in({','.join(values)})"
            for name, values in self.labels.items()
        }
        return {**gpu, "num_cpus": 0, "label_selector": selector}

    def suits(self, node: Mapping[str, Any]) -> bool:
        """Whether a node of `ray.nodes` has the device."""
        labels = node.get("Labels", {})
        return all(labels.get(name) in values for name, values in self.labels.items())


def no_room(
    device: str, places: Mapping[str, Placement], nodes: Sequence[Mapping[str, Any]]
) -> str:
    """Why a device for which there is no room cannot be measured, and what to do about it."""
    suited = [int(n["Resources"].get("GPU", 0)) for n in nodes if places[device].suits(n)]
    others = ", ".join(other for other in places if other != device)
    beside = f" beside {others}" if places[device].gpus <= max(suited, default=0) else ""
    return (
        f"no node has room for {device} (GPUs: {places[device].gpus}){beside}: those of its kind "
        f"have {', '.join(map(str, suited)) or 'none'}; start another node, or leave out one of "
        "the devices"
    )


def room_for(places: Mapping[str, Placement], nodes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many profilers of each device on GPUs may run at once, when all devices are to have some.

    Devices that share nodes, such as `a100` and `a100x4`, take GPUs in turn, who needs most of them
    first, of the fullest node that has so many left: one GPU at a time, `a100` would break up every
    node before four ranks are together.

    Args:
        places: of the devices, by key; those without GPUs are left out of the answer.
        nodes: of `ray.nodes`.
    """
    left = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    suited = {
        device: [i for i, node in enumerate(nodes) if place.suits(node)]
        for device, place in places.items()
        if place.needs_gpu
    }
    room = dict.fromkeys(suited, 0)
    waiting = sorted(suited, key=lambda device: -places[device].gpus)
    while waiting:
        for device in list(waiting):
            each = places[device].gpus
            if not any(set(suited[device]) & set(suited[o]) for o in waiting if o != device):
                room[device] += sum(left[i] // each for i in suited[device])
                waiting.remove(device)
                continue
            fitting = [i for i in suited[device] if left[i] >= each]
            if not fitting:
                waiting.remove(device)
                continue
            left[min(fitting, key=left.__getitem__)] -= each
            room[device] += 1
    return room
