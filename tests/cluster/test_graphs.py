"""Graphs made in processes: all come, each once, and a crash costs one architecture only."""

import itertools
import os
import signal

from cluster import graphs
from cluster.crew import ProfiledGraph
from cluster.graphs import profile_graph, profile_in_processes
from profiler.records import GraphTemplate

LIMITED = graphs._profile_limited

PAIRS = [("test_resnet", 64), ("test_vit", 64), ("test_vit", 67), ("test_efficientnet", 64)]


def crash_on_vit(architecture: str, input_size: int) -> ProfiledGraph:
    """Stands in for a model that ends its process, as native code can; runs in the worker."""
    if architecture == "test_vit":
        os.kill(os.getpid(), signal.SIGKILL)
    return profile_graph(architecture, input_size)


def work_for_ever(architecture: str, input_size: int) -> ProfiledGraph:
    graphs.profile_graph = lambda *_: any(i < 0 for i in itertools.count())
    graphs.CPU_LIMIT_S = 0.2
    return LIMITED(architecture, input_size)


def test_every_pair_comes_once_with_a_graph_or_a_reason():
    results = list(profile_in_processes(PAIRS, 2))
    assert sorted((r.architecture, r.input_size) for r in results) == sorted(PAIRS)
    for result in results:
        assert (result.template is None) != (result.refusal is None)
    graph = next(r.template for r in results if r.architecture == "test_resnet")
    here = profile_graph("test_resnet", 64).template
    assert (
        GraphTemplate.from_bytes(graph).content_hash == GraphTemplate.from_bytes(here).content_hash
    )


def test_a_model_that_ends_its_process_is_refused_and_the_others_come(monkeypatch):
    monkeypatch.setattr(graphs, "_profile_limited", crash_on_vit)
    results = {(r.architecture, r.input_size): r for r in profile_in_processes(PAIRS, 2)}
    assert set(results) == set(PAIRS)
    for pair, result in results.items():
        if pair[0] == "test_vit":
            assert result.refusal == "the static profile ended its process"
        else:
            assert result.template is not None


def test_a_model_that_takes_too_much_cpu_time_is_refused(monkeypatch):
    monkeypatch.setattr(graphs, "_profile_limited", work_for_ever)
    (result,) = profile_in_processes([("test_resnet", 64)], 1)
    assert "s of CPU time" in result.refusal
