"""Our model of CUDA's allocator against the real one, by requests and peaks of an H100."""

import functools
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from trappm.profiler.devices.catalogue import CONTEXT_MIB, card_of
from trappm.profiler.memory.simulation import MIB, Allocator, memory_of
from trappm.profiler.records import Configuration, Measurement, Outcome, Phase, Precision
from trappm.profiler.trace import trace

DATA = Path(__file__).parents[3] / "examples" / "data" / "h100"
H100 = card_of("h100")
assert H100 is not None


def recorded():
    with lzma.open(DATA / "traces" / "allocations.jsonl.xz", "rt") as lines:
        return [json.loads(line) for line in lines]


def measured():
    with lzma.open(DATA / "sweeps" / "check.jsonl.xz", "rt") as lines:
        measurements = [Measurement.from_dict(json.loads(line)) for line in lines]
    return {m.configuration: m for m in measurements if m.outcome is Outcome.OK}


# The batch sizes of a model share its trace.
step_of = functools.cache(trace)


def units(size_bytes):
    return -(-size_bytes // 512)


@pytest.mark.parametrize(
    ("number", "record"),
    [
        pytest.param(number, record, id=str(Configuration(**record["configuration"])))
        for number, record in enumerate(recorded())
    ],
)
def test_simulated_peaks_equal_those_recorded_on_an_h100(number, record):
    allocator = Allocator()
    if number:  # one process: workspaces of the models before were still in use
        for workspace in (32, 32, 1):
            allocator.allocate(units(workspace * MIB))
    blocks = []
    for request in record["requests"]:
        if request[0] > 0:
            blocks.append(allocator.allocate(units(request[0])))
        else:
            allocator.free(blocks[-request[0] - 1])
    peaks = np.array([allocator.peak_live, allocator.peak_reserved]) * 512
    real = np.array([record["peak_allocated_bytes"], record["peak_reserved_bytes"]])
    if record["configuration"]["architecture"].startswith("swin"):
        # Something small of the models before it was still in use, too.
        assert peaks == pytest.approx(real, rel=5e-4)
    else:
        assert peaks.tolist() == real.tolist()


def test_inference_has_a_smaller_context_and_workspace():
    card = H100
    assert card is not None
    infer = [m for c, m in measured().items() if c.phase is Phase.INFER]
    assert len(infer) >= 9
    for measurement in infer:
        beyond_mib = measurement.memory_mib - measurement.memory_detail_mib["peak_reserved"]
        assert beyond_mib == CONTEXT_MIB[Phase.INFER]
    smallest_mib = min(m.memory_detail_mib["peak_allocated"] for m in infer)
    assert smallest_mib > card.library_workspace_mib(Phase.INFER)
    assert smallest_mib < card.library_workspace_mib(Phase.TRAIN)


@pytest.mark.parametrize(
    "architecture", ["resnet18", "mnasnet_100", "mobilenetv2_100", "convnext_atto"]
)
def test_simulated_memory_agrees_with_an_h100(architecture):
    compared = 0
    for configuration, measurement in measured().items():
        if (configuration.architecture, configuration.phase, configuration.precision) != (
            architecture, Phase.TRAIN, Precision.FP32
        ):  # fmt: skip
            continue
        step = step_of(architecture, configuration.input_size)
        simulated = memory_of(step, configuration.batch_size, configuration.optimizer)
        live_mib = simulated.live_mib + H100.library_workspace_mib(Phase.TRAIN)
        real_mib = measurement.memory_detail_mib["peak_allocated"]
        assert live_mib == pytest.approx(real_mib, rel=0.03)
        compared += 1
    assert compared >= 2
