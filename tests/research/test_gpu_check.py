"""The comparison after a GPU day, on sweeps of a simulated one, which are marked as such."""

import dataclasses
import json
import lzma
import re

import pytest

from research.__main__ import main
from research.snapshot.shipped_sheets import OUR_OWN
from research.tables.gpu_check import read_sweeps
from research.tables.label_rate import parts, rates
from trappm.cli import run
from trappm.profiler.records import Measurement, Outcome

LIST = """
- {architecture: test_resnet, batch_size: 64, input_size: 160}
- {architecture: test_resnet, batch_size: 4, input_size: 160, precision: amp-bf16}
- {architecture: test_resnet, batch_size: 1, input_size: 160, phase: infer}
- {architecture: test_resnet, batch_size: 900000, input_size: 160}
"""


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Two sweeps of `simulated:h100`, the second a little slower."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "list.yaml").write_text(LIST, encoding="utf-8")
    arguments = ["measure", "--sweep", str(folder / "list.yaml"), "--device", "simulated:h100",
                 "--protocol", "adaptive", "--out", str(folder / "check.jsonl")]  # fmt: skip
    assert run(arguments) == 0
    again = []
    for line in (folder / "check.jsonl").read_text(encoding="utf-8").splitlines():
        actual = Measurement.from_dict(json.loads(line))
        if actual.outcome is Outcome.OK:
            times_ms = {name: 1.05 * getattr(actual.step, name) for name in ("median_ms", "p95_ms")}
            slower = dataclasses.replace(actual.step, **times_ms)
            again.append(dataclasses.replace(actual, step=slower, power_w=1.01 * actual.power_w))
    lines = "".join(f"{json.dumps(actual.to_dict())}\n" for actual in again)
    (folder / "repeat.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def check(tmp_path_factory, monkeypatch, capsys, profiles_here):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path_factory.getbasetemp() / "gpu_check_home"))

    def compare(folder, *options):
        capsys.readouterr()
        return main(["tables", "h100", str(folder), *options]), *capsys.readouterr()

    return compare


def test_figures_match_the_sweeps(sweeps, check):
    status, output, why = check(sweeps, "--json")
    assert status == 0, why
    actual = json.loads(output)
    assert (actual["compared"], actual["outcomes"]["oom"], actual["measured"]) == (3, 1, False)
    repeats = actual["repeats"]
    assert sum(row["count"] for name, row in repeats.items() if "step_time" in name) == 3
    by_metric = {name.split(",")[0]: row for name, row in repeats.items()}
    assert by_metric["step_time_ms"]["median"] == pytest.approx(100 * 0.05 / 1.025)
    assert by_metric["step_time_ms"]["verdict"] == "misses"
    assert by_metric["power_w"]["median"] == pytest.approx(100 * 0.01 / 1.005)
    assert by_metric["power_w"]["verdict"] == "within"
    assert by_metric["memory_mib"]["median"] == 0
    # The device simulates the memory of fp32 steps by the same rules, and assumes the same context.
    errors = actual["errors"]
    assert errors["memory, allocated"]["phase train"]["count"] == 2
    assert errors["memory, reserved"]["precision fp32"]["ratio"] == pytest.approx(1.0, rel=0.01)
    assert actual["mib_beyond_assumed_context"] == pytest.approx([0.0, 0.0, 0.0])
    for source in ("sheet", "rtx3090"):
        of_source = [e["all"]["count"] for n, e in errors.items() if n.endswith(f": {source}")]
        assert sum(of_source) == 3
    assert actual["label_rates"] == {}  # simulated labels take no time


def test_two_sweeps_are_printed_with_their_differences(sweeps, check):
    status, output, why = check(sweeps)
    assert status == 0, why
    assert re.search(r"step_time_ms, .* 4.88 .* misses", output)


def test_label_rates_of_an_h100():
    sweep = read_sweeps(OUR_OWN / "h100/sweeps")["check.jsonl"]
    seconds, table = parts(sweep), rates(sweep).T
    assert seconds.sum() == pytest.approx(6.19, abs=0.01)
    as_measured = table["one process, as in the sweep"]
    # 124 labels in the seconds of all attempts and those between them.
    assert as_measured["per hour"] == pytest.approx(3600 * 124 / 150 / seconds.sum())
    assert as_measured["busy max"] == as_measured["waits max"] == 0
    third = table["one process, power of a third"]
    assert third["per hour"] > as_measured["per hour"]
    assert (third["busy max"], third["waits max"]) == (0, 0)
    assert third["with power"] < third["labels"] == 124
    fewer = table["A, early stop from 8 steps on"]
    assert fewer["busy max"] > 5


def test_compressed_sweeps_are_split_by_gpu_utilization(tmp_path, sweeps, check):
    lines = (sweeps / "check.jsonl").read_text(encoding="utf-8").splitlines()
    with lzma.open(tmp_path / "check.jsonl.xz", "wt", encoding="utf-8") as file:
        for utilization, line in zip((0.95, 0.3, 0.9, None), lines, strict=True):
            measurement = json.loads(line)
            measurement["environment"]["gpu_utilization"] = utilization
            print(json.dumps(measurement), file=file)
    status, output, why = check(tmp_path)
    assert status == 0, why
    assert "NOT MEASURED" in output
    counts = {
        which: int(re.search(rf"{which}, constants: sheet +all +([0-9]+)", output)[1])
        for which in ("busy device", "waiting for the host")
    }
    assert counts == {"busy device": 2, "waiting for the host": 1}


def test_incomparable_sweeps_are_rejected(tmp_path, sweeps, check):
    assert "has no sweeps" in check(tmp_path)[2]
    (tmp_path / "broken.jsonl").write_text("{}\n", encoding="utf-8")
    assert "broken.jsonl, row 1" in check(tmp_path)[2]
    (tmp_path / "broken.jsonl").unlink()
    text = (sweeps / "check.jsonl").read_text(encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(text.replace("simulated:h100", "simulated:a100"))
    status, _, why = check(tmp_path)
    assert status == 2
    assert "several devices" in why
