"""Placement of profilers and of tasks on the nodes of a cluster."""

from __future__ import annotations

import pytest
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from trappm.cluster import ray_runtime
from trappm.cluster.ray_runtime import (
    ACCELERATOR_LABEL,
    CPU_LABEL,
    NODE_LABEL,
    off_measuring_nodes,
    placement,
    room_for,
)
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import DeviceError


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA H100 80GB HBM3",
     "NVIDIA GeForce RTX 3090", "GeForce RTX 2080 Ti", "NVIDIA GeForce RTX 4070 Ti SUPER",
     "NVIDIA GeForce GTX 1660 Ti", "NVIDIA TITAN V", "NVIDIA RTX A6000", "NVIDIA GH200 480GB",
     "NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"],
)  # fmt: skip
def test_labels_that_ray_sets_match_our_device_keys(name):
    label = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(name)
    node = {"Labels": {ACCELERATOR_LABEL: label}}
    assert placement(read_name(name).key).suits(node)
    assert not placement("l4").suits(node)


def test_the_label_selector_accepts_every_label_of_a_device():
    assert placement("a100").options["label_selector"] == {ACCELERATOR_LABEL: "A100"}
    selector = placement("rtx3090").options["label_selector"][ACCELERATOR_LABEL]
    assert selector == "in(RTX3090,RTX-3090,GeForce-RTX-3090)"
    from ray._private.label_utils import validate_label_selector

    for device in ("rtx3090", "a100-mig-1g.5gb", "a100-80gb"):
        assert validate_label_selector(placement(device).options["label_selector"]) is None


def nodes(*gpus):
    return [{"Labels": {ACCELERATOR_LABEL: "A100"}, "Resources": {"GPU": n}} for n in gpus]


@pytest.mark.extension("parallel")
@pytest.mark.parametrize(
    ("gpus", "ranks", "singles"),
    [((4, 4), 1, 4), ((8,), 1, 4), ((4,), 1, 0), ((2,), 0, 2), ((4, 1), 1, 1), ((4,) * 8, 6, 8),
     ((), 0, 0)],
)  # fmt: skip
def test_ranks_and_single_gpus_share_nodes(gpus, ranks, singles):
    places = {device: placement(device) for device in ("a100", "a100x4")}
    assert room_for(places, nodes(*gpus)) == {"a100": singles, "a100x4": ranks}


def test_devices_on_different_nodes_do_not_share_gpus():
    v100 = {"Labels": {ACCELERATOR_LABEL: "V100"}, "Resources": {"GPU": 3.0}}
    places = {device: placement(device) for device in ("a100", "v100", "cpu-2t")}
    assert room_for(places, [*nodes(4, 2), v100]) == {"a100": 6, "v100": 3}


@pytest.mark.extension("parallel")
def test_a_node_without_room_for_both_devices_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(ray_runtime, "_nodes", lambda: nodes(4))
    ray_runtime.require_nodes(("a100", "a100x2"))
    with pytest.raises(DeviceError, match=r"room for a100 .* in addition to a100x4: .* have 4;"):
        ray_runtime.require_nodes(("a100", "a100x4"))
    with pytest.raises(DeviceError, match=r"room for a100x8 \(GPUs: 8\): "):
        ray_runtime.require_nodes(("a100x8",))


HEAD = {"NodeID": "head", "Resources": {"CPU": 4.0}, "Labels": {NODE_LABEL: "head"}}
SECOND = {"NodeID": "second", "Resources": {"CPU": 1.0}}
HEAD_WITHOUT_CORES = {**HEAD, "Resources": {"memory": 1.0}}
GPU = {
    "NodeID": "gpu",
    "Resources": {"CPU": 8.0, "GPU": 1.0},
    "Labels": {ACCELERATOR_LABEL: "A100"},
}
CORES = {"NodeID": "cores", "Resources": {"CPU": 8.0}, "Labels": {CPU_LABEL: "true"}}


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        ([HEAD, GPU, CORES], "in(head)"),
        ([HEAD, GPU, SECOND], "in(head,second)"),
        ([HEAD_WITHOUT_CORES, GPU, CORES], None),  # better there than nowhere
        ([CORES], None),
    ],
)
def test_profiles_avoid_measuring_nodes_if_there_are_others(monkeypatch, nodes, chosen):
    monkeypatch.setattr(ray_runtime, "_nodes", lambda: nodes)
    expected = {} if chosen is None else {"label_selector": {NODE_LABEL: chosen}}
    assert off_measuring_nodes() == expected
