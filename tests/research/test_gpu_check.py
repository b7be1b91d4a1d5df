"""The comparison after a day with a GPU, on sweeps of a simulated one: no truth, and it says so."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trappm.cli import run
from trappm.profiler.records import Measurement, Outcome

Check = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parents[2]
LIST = """
- {architecture: test_resnet, batch_size: 64, input_size: 160}
- {architecture: test_resnet, batch_size: 4, input_size: 160, precision: amp-bf16}
- {architecture: test_resnet, batch_size: 1, input_size: 160, phase: infer}
- {architecture: test_resnet, batch_size: 900000, input_size: 160}
"""


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sweeps of `simulated:h100`, the second a little slower, as a GPU would give them."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "list.yaml").write_text(LIST, encoding="utf-8")
    arguments = ["measure", "--sweep", str(folder / "list.yaml"), "--device", "simulated:h100",
                 "--protocol", "adaptive", "--out", str(folder / "check.jsonl")]  # fmt: skip
    assert run(arguments) == 0
    again = []
    for line in (folder / "check.jsonl").read_text(encoding="utf-8").splitlines():
        actual = Measurement.from_dict(json.loads(line))
        if actual.outcome is Outcome.OK:
            assert actual.step is not None
            assert actual.power_w is not None
            slower = dataclasses.replace(actual.step, median_ms=1.05 * actual.step.median_ms)
            again.append(dataclasses.replace(actual, step=slower, power_w=1.01 * actual.power_w))
    lines = "".join(f"{json.dumps(actual.to_dict())}\n" for actual in again)
    (folder / "repeat.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def check(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Check:
    """Runs the benchmark; exit status, and what it printed."""
    path = ROOT / "research" / "gpu_day" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    home = tmp_path_factory.getbasetemp() / "gpu_check_home"
    monkeypatch.setenv("TRAPPM_HOME", str(home))

    def run(folder: Path, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpu_check", str(folder), *options])
        capsys.readouterr()
        status = 0
        try:
            module.main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, *capsys.readouterr()

    return run


def test_the_answer_comes_first_and_fits_a_terminal(sweeps: Path, check: Check) -> None:
    status, output, why = check(sweeps)
    assert status == 0, why
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "3 compared" in lines[0]
    assert "1 oom" in lines[1]
    assert lines[2].startswith("NOT MEASURED")
    assert any(line.startswith("repeats, ") for line in lines)
    assert any(line.startswith("    step_time_ms") and "MISSES" in line for line in lines)
    assert any(line.startswith("    power_w") and "within" in line for line in lines)
    assert lines.index("memory, allocated") > 8, "tables come after the answer"


def test_figures_are_those_of_the_sweeps(sweeps: Path, check: Check) -> None:
    status, output, why = check(sweeps, "--json")
    assert status == 0, why
    actual: dict[str, Any] = json.loads(output)
    assert sum(of["step_time_ms"]["count"] for of in actual["repeats"].values() if of) == 3
    repeats = next(of for of in actual["repeats"].values() if of)
    assert repeats["step_time_ms"]["median"] == pytest.approx(100 * 0.05 / 1.025)
    assert repeats["power_w"]["median"] == pytest.approx(100 * 0.01 / 1.005)
    assert repeats["memory_mib"]["median"] == 0
    # The device simulates the memory of fp32 steps by the same rules, and assumes the same context.
    assert actual["allocated"]["phase train"]["count"] == 2
    assert actual["reserved"]["precision fp32"]["ratio"] == pytest.approx(1.0, rel=0.01)
    assert actual["beyond_mib"]["median"] == pytest.approx(0.0, abs=1e-6)
    steps = {name: offs["all"]["count"] for name, offs in actual["step_time"].items()}
    for source in ("sheet", "rtx3090"):
        assert sum(n for name, n in steps.items() if name.endswith(f"constants: {source}")) == 3
    assert not actual["measured"]


def test_compressed_sweeps_are_read_and_steps_are_parted_by_what_the_gpu_was_seen_to_do(
    tmp_path: Path, sweeps: Path, check: Check
) -> None:
    lines = (sweeps / "check.jsonl").read_text(encoding="utf-8").splitlines()
    with lzma.open(tmp_path / "check.jsonl.xz", "wt", encoding="utf-8") as file:
        for utilization, line in zip((0.95, 0.3, 0.9, None), lines, strict=True):
            measurement = json.loads(line)
            measurement["environment"]["gpu_utilization"] = utilization
            print(json.dumps(measurement), file=file)
    status, output, why = check(tmp_path, "--json")
    assert status == 0, why
    steps = {name: offs["all"]["count"] for name, offs in json.loads(output)["step_time"].items()}
    assert steps["busy device, constants: sheet"] == 2
    assert steps["waiting for the host, constants: sheet"] == 1
    (tmp_path / "check.jsonl").write_text(lines[0], encoding="utf-8")
    assert "check.jsonl twice" in check(tmp_path)[2]


def test_what_cannot_be_compared_is_told_in_one_line(
    tmp_path: Path, sweeps: Path, check: Check
) -> None:
    status, output, why = check(tmp_path)
    assert (status, output) == (2, "")
    assert "has no sweeps" in why
    (tmp_path / "broken.jsonl").write_text("{}\n", encoding="utf-8")
    assert "line 1 of" in check(tmp_path)[2]
    (tmp_path / "broken.jsonl").unlink()
    text = (sweeps / "check.jsonl").read_text(encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(text.replace("simulated:h100", "simulated:a100"))
    status, _, why = check(tmp_path)
    assert status == 2
    assert "several devices" in why
    assert len(why.splitlines()) == 1
