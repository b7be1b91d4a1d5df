"""Ranks on CPU over gloo: real processes that share a step, die and run out of memory."""

import functools
import os
import resource
from dataclasses import replace

import psutil
import pytest
from trusting import TRUSTING

from trappm.profiler.devices import open_device
from trappm.profiler.host.environment import stack_fingerprint
from trappm.profiler.measuring.isolation import Measurer
from trappm.profiler.records import Configuration, Execution, Outcome

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")

ENDLESS = replace(TRUSTING, max_steps=1_000_000, min_steps=1_000_000, max_seconds=1000.0)
TINY = Configuration(architecture="mobilenetv3_small_050", batch_size=2, input_size=64)


@pytest.fixture(scope="module")
def measurer(tmp_path_factory):
    with Measurer(lock_dir=tmp_path_factory.mktemp("locks")) as measurer:
        yield measurer


def ranks():
    """The processes of the ranks that are measured now, in their order."""
    (server,) = [p for p in psutil.Process().children() if p.children()]
    ((family,),) = [server.children()]
    return sorted(family.children(), key=lambda process: process.create_time())


def during(measurer, phase, act, of=TINY, **settings):
    """Measures endlessly, and acts on the ranks as the phase begins."""
    seen = []

    def on_phase(name):
        if name == phase:
            seen.extend(ranks())
            act(seen)

    protocol = replace(ENDLESS, **settings)
    measurement = measurer.measure(of, "cpu-2x1t", protocol, on_phase=on_phase)
    assert len(seen) == 2
    assert not [process for process in seen if process.is_running()]
    return measurement


def test_compiled_steps_of_ranks_are_unsupported(measurer):
    compiled = replace(TINY, execution=Execution.COMPILE)
    measurement = measurer.measure(compiled, "cpu-2x1t", TRUSTING)
    assert measurement.outcome is Outcome.UNSUPPORTED
    assert "several ranks" in measurement.message


@pytest.fixture(scope="module")
def of_resnet18(measurer):
    """One measurement of resnet18 for each device that is asked for."""
    step = Configuration(architecture="resnet18", batch_size=2, input_size=64)
    return functools.cache(lambda key: measurer.measure(step, key, TRUSTING))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_share_a_step(of_resnet18, strategy):
    key = "cpu-2x1t" if strategy == "ddp" else "cpu-2x1t-fsdp"
    measurement = of_resnet18(key)
    assert measurement.outcome is Outcome.OK, measurement.message
    facts = measurement.environment
    assert (measurement.device, facts["device"]) == (key, key)
    assert (facts["world_size"], facts["strategy"], facts["collectives"]) == (2, strategy, "gloo")
    assert len(set(facts["pinned_cores"])) == 2
    assert measurement.step.median_ms == max(facts["rank_step_ms"])
    assert measurement.memory_mib == max(facts["rank_memory_mib"])
    assert measurement.samples_per_second == 2 * 2 * 1000 / measurement.step.median_ms
    if strategy == "ddp":
        assert len(facts["rank_alone_ms"]) == 2
        assert facts["straggler_ratio"] >= 1
    else:
        assert "without communication" in measurement.missing["straggler_ratio"]


def test_ddp_stores_gradients_twice(of_resnet18):
    alone, ddp, fsdp = (
        of_resnet18(key).memory_mib for key in ("cpu-1t", "cpu-2x1t", "cpu-2x1t-fsdp")
    )
    assert alone is not None
    assert ddp > alone + 30  # buckets as large as all gradients: 45 MiB
    assert fsdp < ddp


def test_killed_rank_ends_all_ranks(measurer):
    measurement = during(measurer, "measure", lambda processes: processes[1].kill())
    assert (measurement.outcome, measurement.failed_in) == (Outcome.ERROR, "measure")
    assert "killed by SIGKILL" in (measurement.message or "")
    assert "rank 1 of 2" in (measurement.message or "")


def test_hanging_rank_is_a_timeout(measurer):
    measurement = during(measurer, "warmup", lambda two: two[1].suspend(), timeout_s=6.0)
    assert measurement.outcome is Outcome.TIMEOUT
    assert measurement.message == "killed after 6 s"


def test_one_rank_runs_out_of_memory(measurer):
    def shrink(processes):
        size = processes[1].memory_info().vms + (200 << 20)
        processes[1].rlimit(resource.RLIMIT_AS, (size, size))

    measurement = during(measurer, "create", shrink, of=replace(TINY, batch_size=512))
    assert measurement.outcome is Outcome.OOM, measurement.message
    assert measurement.message.startswith("rank 1 of 2")
    whole_mib = measurement.memory_detail_mib["host_memory"]
    assert 0 < measurement.memory_detail_mib["capacity"] < whole_mib
    again = measurer.measure(TINY, "cpu-2x1t", TRUSTING)
    assert again.outcome is Outcome.OK, again.message


def test_strategies_are_different_stacks():
    facts = open_device("cpu-2x1t").environment()
    other = {**facts, "strategy": "fsdp"}
    assert stack_fingerprint(facts) != stack_fingerprint(other)
    alone = open_device("cpu-1t").environment()
    assert not {"world_size", "strategy", "collectives"} & alone.keys()
