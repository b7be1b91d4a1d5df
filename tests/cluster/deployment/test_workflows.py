"""CI workflows: what they run and when."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = {
    path.name: yaml.load(path.read_text(), yaml.BaseLoader)  # noqa: S506, TID251  # `on` stays text
    for path in (ROOT / ".github" / "workflows").glob("*.yml")
}


def _steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def _that_run(command):
    return [w for w in WORKFLOWS.values() if command in [s.get("run") for s in _steps(w)]]


def test_slow_tests_run_every_night_and_on_demand():
    (slow,) = _that_run("make test-slow")
    assert slow["on"].keys() == {"schedule", "workflow_dispatch"}
    assert all(re.fullmatch(r"\d+ \d+ \* \* \*", when["cron"]) for when in slow["on"]["schedule"])


def test_every_push_and_pull_request_is_checked():
    (check,) = _that_run(".ci/run")
    assert check["on"].keys() == {"push", "pull_request"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_jobs_run_anywhere_with_few_rights(name):
    workflow = WORKFLOWS[name]
    used = [step["uses"] for step in _steps(workflow) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+\.\d+\.\d+", action) for action in used)
    assert all(job["runs-on"].startswith("ubuntu-") for job in workflow["jobs"].values())
    assert workflow["permissions"] == {"contents": "read"}
