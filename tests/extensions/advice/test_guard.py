"""Limits of memory, time and cost, with an exit status for scripts."""

import json

import pytest

import trappm
from trappm.extensions.advice import guard
from trappm.prediction.answer import answer_by_simulation
from trappm.prediction.models import subject_of
from trappm.prediction.question import Question

WORDS = "check test_resnet --batch-size 64 --device a100"
RUN = "--epochs 10 --samples 1000000"


@pytest.fixture(scope="module", autouse=True)
def home(module_home):
    """One data folder, so that what was traced is traced once."""


@pytest.fixture(scope="module")
def step():
    return trappm.predict("test_resnet", batch_size=64, device="a100", epochs=10, samples=1_000_000)


def test_status_says_whether_the_limit_is_beyond_the_interval(step, command):
    low, high = step.intervals["memory_mib"]
    for limit_mib, expected, word in (
        (high + 1, 0, "Holds"), (step.memory_mib, 3, "Not certain"), (low - 1, 1, "Does not hold")
    ):  # fmt: skip
        status, out, err = command(f"{WORDS} --max-memory {limit_mib:.0f}MiB")
        assert (status, err) == (expected, "")
        assert out.startswith(f"{word}: memory is ")
    assert command(WORDS)[0] == 0


def test_the_worst_limit_decides(step, command):
    limits = f"--max-memory 38GiB --max-hours {step.run.low_hours / 2:.4g} --max-cost 1e6"
    status, out, _ = command(f"{WORDS} {RUN} {limits} --json")
    report = json.loads(out)
    assert status == report["exit_status"] == 1
    assert [limit["outcome"] for limit in report["limits"]] == ["holds", "does not hold", "holds"]


def test_a_figure_that_is_not_predicted_is_not_certain(command):
    status, out, _ = command(f"{WORDS} {RUN} --max-cost 5 --device rtx-2060")
    assert status == 3
    assert out.startswith("Not certain: cost is not predicted (no price is known for rtx-2060")


def test_a_run_that_is_not_predicted_has_the_reason(monkeypatch):
    question, subject = Question(epochs=10, samples=1000), subject_of("test_resnet")
    only_memory = answer_by_simulation(question, subject, "a100-40gb", "its graph is unknown")
    monkeypatch.setattr(guard, "predict", lambda *_, **__: only_memory)
    made = trappm.check("test_resnet", epochs=10, samples=1000, max_hours=5)
    assert "time is not predicted (its graph is unknown)" in str(made)


def test_slurm_lines_have_the_upper_bound_of_the_time(step, printed, refusal):
    words = "predict test_resnet --batch-size 64 --device a100 --slurm"
    gres, time = printed(f"{words} {RUN}").splitlines()[1:3]
    assert gres == "#SBATCH --gres=gpu:a100:1"
    days, _, clock = time.removeprefix("#SBATCH --time=").partition("-")
    hours, minutes, _ = map(int, clock.split(":"))
    total = 24 * int(days) + hours + minutes / 60
    assert step.run.high_hours <= total <= step.run.high_hours + 1 / 60
    assert "--epochs" in refusal(words)
