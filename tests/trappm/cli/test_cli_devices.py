"""`trappm devices` and `trappm measure --kernels`, as a user meets them."""

import json
import os

import pytest
from store_whole import kernel

from trappm.profiler.kernels.characterising import Characteriser
from trappm.profiler.kernels.kernel_call import KernelCall, KernelMeasurement, Operator
from trappm.store import Home, Store

MEASURE = ("measure", "--kernels", "--device")
SOME = [
    kernel(
        time_ms=1.0, call=KernelCall.of(Operator.MATMUL, batch=1, rows=1000, depth=1000,
        columns=1000), attempt_key="matmul",
    ),
    kernel(time_ms=1.0, call=KernelCall.of(Operator.COPY, batch=1024, width=1024)),
    kernel("error", message="it failed"),
]  # fmt: skip


@pytest.fixture
def run(command, tmp_path, monkeypatch):
    """Return the function that runs a command, with an empty data folder."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return command


@pytest.fixture
def filled(run, tmp_path):
    with Store.open(Home.open().database_url) as store:
        store.kernels.record(SOME)


def test_devices_are_shown_with_evidence_and_timed_kernels(run, filled, printed, as_json, refusal):
    device = SOME[0].device
    out = printed("devices", device, "v100")
    assert out.splitlines()[0] == device
    assert "  timed kernels: 3" in out
    assert "v100-16gb\n  training: step time from its labels" in out
    facts = as_json("devices", device)
    assert [(row["device"], row["kernels"]) for row in facts] == [(device, 3)]
    assert "unknown device 'v9000'" in refusal("devices v9000")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_collective_measurements_are_stored_and_summarized(run, tmp_path):
    """For real, over gloo; a busy machine may be too noisy to tell the link."""
    status, out, error = run(*MEASURE, "cpu-2x1t", "--seconds", "1")
    assert status == 0, error
    first, *_, last = out.splitlines()
    assert "collectives measured in" in first
    assert last.startswith("cpu-2x1t: ")
    assert "GB/s per rank (host" in last or "measure them on an idle host" in last
    with Store.open_to_read(f"sqlite:///{tmp_path}/home/labels.db") as store:
        kept = list(store.kernels.each(device="cpu-2x1t"))
    assert {m.call["ranks"] for m in kept} == {2}
    assert {m.call.operator for m in kept} == {
        Operator.ALL_REDUCE, Operator.ALL_GATHER, Operator.REDUCE_SCATTER
    }  # fmt: skip
    assert last in run("devices", "cpu-2x1t")[1]
    assert run(*MEASURE, "cpu-2x1t-fsdp")[0] == 2


def test_kernels_that_cannot_be_stored_are_counted(run, monkeypatch, tmp_path):
    results = [
        kernel(time_ms=1.0, device="cpu-1t"),
        kernel(time_ms=1.0, device="cpu-1t", batch=9, facts={"name": "a \x00 b"}),
    ]

    def characterise(self, device, *, seconds, on_result):
        for result in results:
            on_result(result, len(results))

    monkeypatch.setattr(Characteriser, "characterise", characterise)
    status, out, _ = run(*MEASURE, "cpu-1t")
    assert status == 0
    assert "1 of 2 not" in out
    assert "cannot be recorded" in out
    with Store.open_to_read(f"sqlite:///{tmp_path}/home/labels.db") as store:
        good, bad = store.kernels.each()
    assert (good.outcome, bad.outcome, bad.failed_in) == ("ok", "error", "record")


def test_kernels_are_written_to_a_file_without_a_database(run, tmp_path):
    path = tmp_path / "kernels.jsonl"
    status, out, error = run(*MEASURE, "cpu-1t", "--seconds", "1", "--out", path, "--json")
    assert status == 0, error
    answer = json.loads(out)
    lines = [KernelMeasurement.from_dict(json.loads(line)) for line in path.open()]
    assert len({line.call for line in lines}) == answer["kernels"] >= 150
    assert answer["device"] == "cpu-1t"
    assert not (tmp_path / "home" / "labels.db").exists()


@pytest.mark.parametrize("arguments", [["cpu-1t", "--seconds", "0"], ["v9000"], ["simulated:a100"]])
def test_bad_input_is_reported_in_one_line(arguments, run, refusal, tmp_path):
    refusal(*MEASURE, *arguments, "--out", tmp_path / "out")
