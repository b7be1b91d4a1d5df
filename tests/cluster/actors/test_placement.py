"""Placement of profilers and of tasks on the nodes of a cluster."""

from __future__ import annotations

import pytest
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from trappm.cluster import ray_runtime
from trappm.cluster.ray_runtime import (
    ACCELERATOR_LABEL,
    NODE_LABEL,
    can_run_elsewhere,
    has_other_nodes,
    learner_options,
    placement,
    tracing_options,
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


def nodes(*gpus):
    return [{"Labels": {ACCELERATOR_LABEL: "A100"}, "Resources": {"GPU": n}} for n in gpus]


@pytest.mark.extension("parallel")
def test_ranks_need_their_gpus_on_one_node(monkeypatch):
    assert placement("a100").room(nodes(4, 2)) == 6
    assert placement("a100x4").room(nodes(4, 2)) == 1
    monkeypatch.setattr(ray_runtime, "_nodes", lambda: nodes(4, 4))
    ray_runtime.require_nodes(("a100x4",))
    with pytest.raises(DeviceError, match=r"room for a100x8 \(GPUs: 8\): .* have 4, 4; start"):
        ray_runtime.require_nodes(("a100x8",))


HEAD = {"NodeID": "head", "Resources": {"CPU": 4.0}, "Labels": {NODE_LABEL: "head"}}
SECOND = {"NodeID": "second", "Resources": {"CPU": 1.0}}
HEAD_WITHOUT_CORES = {**HEAD, "Resources": {"memory": 1.0}}
GPU = {
    "NodeID": "gpu",
    "Resources": {"CPU": 8.0, "GPU": 1.0},
    "Labels": {ACCELERATOR_LABEL: "A100"},
}


@pytest.mark.parametrize(
    ("nodes", "others"),
    [
        ([HEAD, GPU], True),
        ([HEAD_WITHOUT_CORES, GPU, SECOND], True),
        ([HEAD_WITHOUT_CORES, GPU], False),
    ],
)
def test_traces_avoid_nodes_that_measure_by_their_labels(monkeypatch, nodes, others):
    monkeypatch.setattr(ray_runtime, "_nodes", lambda: nodes)
    options = tracing_options(["a100", "v100"])
    assert options["label_selector"] == {ACCELERATOR_LABEL: "!in(A100,V100)"}
    assert options["fallback_strategy"] == [{"label_selector": {}}]  # better there than nowhere
    assert has_other_nodes(["a100", "v100"]) is others
    of_a_pool = tracing_options([])  # avoids all GPUs that there are
    assert of_a_pool["label_selector"] == {ACCELERATOR_LABEL: "!in(A100)"}


def test_a_learner_is_put_next_to_the_campaign_or_on_a_gpu(monkeypatch):
    head, gpu = ({**node, "Resources": {**node["Resources"], "memory": memory}}
                 for node, memory in ((HEAD, 4 << 30), (GPU, 64 << 30)))  # fmt: skip
    monkeypatch.setattr(ray_runtime, "_nodes", lambda: [head, gpu])
    this_node = "ab" * 28
    head["NodeID"] = this_node
    monkeypatch.setattr(ray_runtime, "_this_node", lambda: this_node)
    beside = learner_options(None, 8 << 30)
    assert beside["scheduling_strategy"].node_id == this_node
    assert (beside.get("num_gpus"), beside["memory"]) == (None, 4 << 30)
    for device, selector in (("a100", {ACCELERATOR_LABEL: "A100"}), ("gpu", {})):
        assert learner_options(device, 8 << 30) == {
            "num_gpus": 1, "num_cpus": 0, "label_selector": selector, "memory": 8 << 30,
        }  # fmt: skip
    later = learner_options("h100", 8 << 30)  # an autoscaler may start such a node
    assert (later["num_gpus"], later["memory"]) == (1, 8 << 30)


def test_nodes_that_are_refused_trace_nothing(monkeypatch):
    monkeypatch.setattr(ray_runtime, "_nodes", lambda: [HEAD, GPU])
    options = tracing_options(["a100"], ["second", "head"])
    without = {NODE_LABEL: "!in(head,second)"}
    assert options["label_selector"] == {ACCELERATOR_LABEL: "!in(A100)"} | without
    assert options["fallback_strategy"] == [{"label_selector": without}]
    assert can_run_elsewhere(["head"])
    assert not can_run_elsewhere(["head", "gpu"])
