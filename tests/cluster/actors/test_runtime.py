"""Which nodes of a cluster a task may take, from what Ray tells of them."""

from __future__ import annotations

import pytest

from trappm.cluster import ray_runtime
from trappm.cluster.ray_runtime import ACCELERATOR_LABEL, CPU_LABEL, NODE_LABEL, off_measuring_nodes

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
def test_profiles_stay_off_nodes_that_measure_where_there_are_others(monkeypatch, nodes, chosen):
    monkeypatch.setattr(ray_runtime, "_nodes", lambda: nodes)
    expected = {} if chosen is None else {"label_selector": {NODE_LABEL: chosen}}
    assert off_measuring_nodes() == expected
