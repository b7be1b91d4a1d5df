"""Profiler actors on GPUs of Ray, on a stub of the driver's library that Ray finds by itself too.

What a GPU node does up to the driver is real: Ray counts the GPUs and shares them out by
CUDA_VISIBLE_DEVICES, the actor describes its own, and the measuring process asks for CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvml_stub import Board, Machine, error

pytestmark = pytest.mark.timeout(900)  # Ray and torch start in several processes

ROOT = Path(__file__).parents[3]

PROGRAM = """
import json, sys
from trappm.cluster.ray_runtime import placement, ray_runtime
from trappm.profiler.records import QUICK
from trappm.profiler.records import Configuration

device, count = sys.argv[1], int(sys.argv[2])
with ray_runtime(None):
    import ray
    from trappm.cluster.campaign.profiler_pool import ProfilerActor
    gpus = ray.cluster_resources()["GPU"]
    start = ray.remote(ProfilerActor).options(max_concurrency=2, **placement(device).options).remote
    actors = [start(device) for _ in range(count)]
    described = [ray.get(actor.describe.remote()) for actor in actors]
    free = ray.available_resources().get("GPU", 0)
    step = Configuration(architecture="test_resnet", batch_size=1, input_size=32)
    working = next(a for a, facts in zip(actors, described) if "refusal" not in facts)
    found = ray.get(working.measure.remote(step, QUICK, "once"))
print(json.dumps({"gpus": gpus, "free": free, "described": described,
                  "uuid": found.environment["device_uuid"],
                  "end": [found.outcome, found.failed_in, found.message]}))
"""


def answers(program: str, machine: Machine, *arguments: str) -> Any:
    """What the program prints on this machine."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **machine.variables, "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_no_cuda(end: Any) -> None:
    """As far as one comes without a GPU: the measuring process looks for CUDA on its own."""
    outcome, phase, message = end
    assert (outcome, phase) == ("error", "worker")
    assert "cannot use CUDA on NVIDIA H200" in message


@pytest.mark.slow
@pytest.mark.extension("parallel")
def test_ranks_get_the_gpus_of_one_node() -> None:
    names = "aaaa", "bbbb", "cccc"
    machine = Machine(*(Board(f"GPU-{name}", "NVIDIA H200") for name in names))
    answer = answers(PROGRAM, machine, "h200x2", "1")
    (facts,) = answer["described"]
    assert len(set(facts["gpus"])) == 2
    assert answer["free"] == 1
    assert answer["uuid"] == "+".join(f"GPU-{names[int(gpu)]}" for gpu in facts["gpus"])
    assert_no_cuda(answer["end"])


@pytest.mark.slow
def test_each_actor_describes_the_gpu_that_ray_assigned() -> None:
    machine = Machine(
        Board("GPU-aaaa", "NVIDIA H200"),
        Board("GPU-bbbb", handle=error("GPU_IS_LOST")),
    )
    report = answers(PROGRAM, machine, "h200", "2")
    assert report["gpus"] == 2
    (working,) = [facts for facts in report["described"] if "refusal" not in facts]
    (failed,) = [facts["refusal"] for facts in report["described"] if "refusal" in facts]
    assert working["gpus"] == ["0"]
    assert "no GPU here has this number or name; NVML on GPU 1 of this machine: GPU is" in failed
    assert_no_cuda(report["end"])
    assert report["uuid"] == "GPU-aaaa"
