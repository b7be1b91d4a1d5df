"""Kernel measurements in the store: recorded once, asked for, in SQL, in files and out."""

import dataclasses
import json

import pytest
from store_whole import kernel

from trappm.profiler.errors import InputError
from trappm.profiler.kernels.kernel_call import KernelCall, Operator
from trappm.profiler.records import Outcome, Provenance
from trappm.store.kernel_measurements import export_kernels, read_kernels, recordable

SOME = [
    kernel("ok", batch=1, time_ms=0.5, iqr_ms=0.125, samples_ms=(0.5, 0.25), power_w=50.0),
    kernel("ok", batch=2, time_ms=1.5, energy_j=0.5),
    kernel("oom", batch=3, failed_in="warmup", message="it ran out"),
    kernel(
        "ok", time_ms=0.25, call=KernelCall.of(Operator.COPY, batch=4, width=256),
        attempt_key="copy",
    ),
    kernel("ok", batch=1, time_ms=9.0, device="a100", attempt_key="elsewhere"),
]  # fmt: skip


def test_recorded_kernels_are_read_unchanged(store):
    store.kernels.record(SOME)
    assert [*store.kernels.each()] == SOME
    assert [*store.kernels.each(device="a100")] == SOME[-1:]
    assert store.kernels.devices() == {"a100": 1, SOME[0].device: 4}


def test_kernels_of_a_run_share_their_conditions(store):
    store.kernels.record(SOME)
    rows, _ = store.query_sql("SELECT COUNT(*) AS n FROM kernel_conditions")
    assert rows["n"].tolist() == [2]  # one for each environment


def test_the_last_successful_attempt_of_each_call_counts(store):
    again = kernel("ok", batch=1, time_ms=0.75, attempt_key="again")
    failed = kernel("error", batch=2, attempt_key="later", message="failed")
    twice = kernel("error", batch=3, attempt_key="once more", message="failed")
    store.kernels.record([*SOME[:3], again, failed, twice])
    known = {m.call: m for m in store.kernels.latest(SOME[0].device)}
    assert known == {again.call: again, SOME[1].call: SOME[1], twice.call: twice}


def test_kernels_of_another_software_stack_are_ignored(store):
    environment = {**SOME[0].environment, "torch": "9.9"}
    later = kernel(
        "ok", time_ms=3.0, environment=environment, attempt_key="later",
        started_at="2026-02-02T00:00:00+00:00",
    )  # fmt: skip
    store.kernels.record([*SOME[:2], later])
    assert store.kernels.latest(SOME[0].device) == [later]


def test_a_device_without_kernels_is_reported_with_those_that_have_some(store):
    with pytest.raises(InputError, match="trappm measure --kernels --device v100"):
        store.kernels.latest("v100")
    store.kernels.record(SOME)
    with pytest.raises(InputError, match="there are some of a100"):
        store.kernels.latest("v100")


@pytest.mark.parametrize(
    "bad",
    [
        {"time_ms": float("nan")},
        {"power_w": -1.0},
        {"samples_ms": (0.0,)},
        {"message": "a\0b"},
        {"facts": {"x": float("inf")}},
        {"started_at": "2026-01-01T00:00:00"},
    ],
)
def test_kernels_that_cannot_be_stored_become_failed_attempts(bad):
    wrong = dataclasses.replace(kernel("ok", batch=9, time_ms=1.0), **bad)
    kept = recordable(wrong)
    assert (kept.outcome, kept.failed_in, kept.call) == (Outcome.ERROR, "record", wrong.call)
    assert "cannot be recorded" in kept.message
    assert recordable(SOME[0]) is SOME[0]


def test_kernels_without_a_measuring_environment_are_imported(tmp_path):
    path = tmp_path / "kernels.jsonl"
    export_kernels([dataclasses.replace(SOME[0], environment={"device": "cpu-2t"})], path)
    (read,) = read_kernels(path)
    assert read.provenance is Provenance.IMPORTED


def changed(**changes):
    return json.dumps({**SOME[0].to_dict(), **changes})


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "{}",
        changed(call="softmax batch=0 width=64 fp32"),
        changed(time_ms=-1.0),
        changed(time_ms=float("inf")),
        changed(samples_ms=[1.0] * 10_001),
        changed(started_at="2026-01-01T00:00:00"),
        changed(facts={"x": "a\0"}),
        changed(surprise=1),
        "[" * 100_000,
        "\udcff",
    ],
    ids=lambda line: line[:40].encode("ascii", "replace").decode(),
)
def test_a_damaged_line_refuses_the_file(tmp_path, line):
    path = tmp_path / "kernels.jsonl"
    good = json.dumps(SOME[0].to_dict())
    path.write_bytes(f"{good}\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"kernels.jsonl, line 2: .*nothing was imported"):
        list(read_kernels(path))


def test_missing_kernel_files_are_reported(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        list(read_kernels(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="cannot be written"):
        export_kernels(SOME, tmp_path / "no folder" / "kernels.jsonl")
