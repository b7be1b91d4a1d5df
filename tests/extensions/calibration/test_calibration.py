"""Calibrations: what a handful of steps gains, and which steps and files are refused."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import trappm
from trappm.profiler.records import (
    Configuration,
    Measurement,
    Outcome,
    Protocol,
    Provenance,
    StepSummary,
)
from trappm.profiler.records.step_scope import IN_TRAINING

PAGE = (Path(__file__).parents[3] / "docs/calibration.md").read_text()
TABLES = re.findall(r"```csv\n(.*?)```", PAGE, re.DOTALL)
SLOWER, MORE_MIB = 1.5, 400.0
STEPS = [("test_resnet", 8), ("test_vit", 16), ("resnet10t", 4), ("test_resnet", 64)]


@pytest.fixture(autouse=True, scope="module")
def home(module_home):
    """A data folder with the own card of the page."""
    (module_home / "cards.csv").write_text(TABLES[1])
    return module_home


def label(name, batch_size, *, slower=SLOWER, more_mib=MORE_MIB, **changes):
    """A step of the own card, as a callback records it: slower and larger than predicted."""
    step = trappm.predict(
        name, batch_size=batch_size, input_size=64, device="mycard", precision="fp32",
        optimizer="sgd",
    )  # fmt: skip
    ms = slower * step.step_time_ms
    made = Measurement(
        configuration=Configuration(architecture=name, batch_size=batch_size, input_size=64),
        device="mycard", outcome=Outcome.OK, protocol=Protocol(name=IN_TRAINING),
        started_at="2026-11-30T00:00:00+00:00", duration_s=1.0, provenance=Provenance.IMPORTED,
        step=StepSummary(median_ms=ms, mean_ms=ms, iqr_ms=0.0, p95_ms=ms),
        memory_mib=step.memory_mib + more_mib,
    )  # fmt: skip
    return replace(made, **changes)


def write(path, labels):
    path.write_text("".join(json.dumps(each.to_dict()) + "\n" for each in labels))
    return path


@pytest.mark.slow
def test_documented_example(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("steps.csv").write_text(TABLES[0])
    typed, shown = re.search(r"```console\n\$ trappm (.*?)\n(.*?)```", PAGE, re.DOTALL).groups()
    status, out, err = command(*shlex.split(typed))
    assert (status, err) == (0, "")
    for line in shown.splitlines()[:2]:
        assert line in out
    for line in shown.splitlines()[3:5]:
        metric, before, after, verdict = re.match(
            r"(.*?) +train +8 +(\S+) +(\S+) +(.*)", line
        ).groups()
        now = re.search(rf"{metric} +train +8 +(\S+) +(\S+) +{verdict}", out)
        assert [float(x) for x in now.groups()] == pytest.approx(
            [float(before), float(after)], rel=0.1
        )


def test_steps_of_an_own_card_correct_time_and_memory(as_json, tmp_path):
    unlike = [
        label("test_vit", 4, configuration=Configuration(
            architecture="test_vit", batch_size=4, input_size=64, execution="compile")),
        label("test_vit", 4, device="a100"),
        label("test_vit", 4, provenance=Provenance.SIMULATED),
        label("test_vit", 4, outcome=Outcome.OOM, step=None, memory_mib=None),
        label("test_vit", 4, configuration=Configuration(
            architecture="no_such_model", batch_size=4, input_size=64)),
    ]  # fmt: skip
    steps = write(tmp_path / "steps.jsonl", [*(label(*step) for step in STEPS), *unlike])
    folder = tmp_path / "calibrated"
    made = as_json("calibrate", "--device", "mycard", "--steps", steps, "--to", folder)
    time, memory = made["gains"]
    assert time["before_percent"] == pytest.approx(100 * (1 - 1 / SLOWER))
    assert time["after_percent"] < 5
    assert memory["before_percent"] > 10
    assert memory["after_percent"] < 2
    reasons = [row["reason"] for row in made["unusable"]]
    assert [row["row"] for row in made["unusable"]] == [5, 6, 7, 8, 9]
    for reason, words in zip(
        reasons, ["compiled", "measured on a100", "simulated", "oom", "no_such_model"], strict=True
    ):
        assert words in reason
    other = {"batch_size": 32, "input_size": 64, "device": "mycard", "precision": "fp32"}
    before = trappm.predict("mobilenetv3_small_100", **other)
    after = trappm.predict("mobilenetv3_small_100", **other, snapshot=folder)
    assert after.step_time_ms / before.step_time_ms == pytest.approx(SLOWER, rel=0.15)
    assert after.memory_mib - before.memory_mib == pytest.approx(MORE_MIB, rel=0.15)


def test_calibration_that_does_not_help_has_no_snapshot(command, tmp_path):
    exact = [label(*step, slower=1.0, more_mib=0.0) for step in STEPS]
    steps = write(tmp_path / "steps.jsonl", exact)
    status, out, err = command("calibrate --device mycard --steps", steps)
    assert (status, err) == (1, "")
    assert out.count("did not help") == 3
    assert "there is no snapshot" in out


GOOD = "model,batch_size,input_size,step_time_ms\n" + "test_vit,4,64,9.5\n" * 3


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("steps.csv", GOOD.replace("batch_size", "batch"), "unknown column 'batch'; did you mean"),
        ("steps.csv", GOOD + "test_vit,4,64\n", "line 5: it has 3 cells"),
        ("steps.csv", GOOD + "test_vit,4,64,fast\n", "line 5: step_time_ms is 'fast'"),
        ("steps.csv", GOOD + "test_vit,4,64,nan\n", "line 5: step_time_ms is 'nan'"),
        ("steps.csv", GOOD + "test_vit,4,64,9.5\n" * 98, "more than 100 steps"),
        ("steps.csv", GOOD.replace("test_vit", "http.server:test"), "it names code to import"),
        ("steps.jsonl", "{}", "row 1"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(name, text, words, refusal, tmp_path):
    (tmp_path / name).write_text(text)
    assert words in refusal("calibrate --device mycard --steps", tmp_path / name)


def test_unknown_cards_and_existing_folders_are_refused(refusal, tmp_path):
    (tmp_path / "steps.csv").write_text(GOOD)
    steps = ("--steps", tmp_path / "steps.csv")
    assert "unknown device 'nocard'" in refusal("calibrate --device nocard", *steps)
    assert "already exists" in refusal("calibrate --device mycard --to", tmp_path, *steps)
