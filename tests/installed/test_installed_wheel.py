"""The wheel in an empty environment, from a folder that has a `store` and others of its own.

Built, installed with pip under our constraints (with what campaigns need, then with the driver of
PostgreSQL), and used from there: nothing of the checkout is on anybody's path.
"""

import os
import subprocess
import venv
from pathlib import Path

import pytest
import yaml
from guarded_postgresql import launched_and_left
from test_foreign_folder import make_foreign
from test_main_job import BUDGET, SPEC
from test_scaffold import build_wheel

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A foreign project's folder."""
    return make_foreign(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def environment(place):
    """What a shell there has: nothing of ours or pytest's on Python's path."""
    unwanted = ("PYTHONPATH", "TRAPPM_DATABASE", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | {"TRAPPM_HOME": str(place / "home"), "COLUMNS": "160"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Of an environment with the wheel and what campaigns need."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install(python, f"{wheel}[campaign]")
    return python


def install(python, *what):
    constraints = str(ROOT / "constraints.txt")
    command = [python, "-m", "pip", "install", "-q", "-c", constraints, *what]
    subprocess.run(command, check=True, cwd="/")


@pytest.fixture(scope="module")
def run(python, place, environment):
    """Types a command of that environment in that folder."""

    def run(name, *arguments):
        done = subprocess.run(
            [python.with_name(name), *arguments], cwd=place, env=environment, text=True,
            capture_output=True, timeout=1800, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_wheel_installs_no_extras(run):
    held = {line.split("==")[0].lower() for line in run("pip", "freeze").splitlines()}
    assert "safetensors" in held
    assert not {"psycopg", "scikit-learn", "xgboost-cpu", "matplotlib", "optuna", "pytest"} & held
    run("pip", "check")


def test_a_campaign_runs_and_its_snapshot_predicts(run, place):
    (place / "tiny.yaml").write_text(yaml.safe_dump(SPEC))
    report = run("trappm", "campaign", "launch", "tiny.yaml")
    assert "predicted against measured" in report
    assert f"{sum(BUDGET.values())} labels" in run("trappm", "labels", "query")
    question = ["resnet18", "--batch-size", "4", "--input-size", "64", "--device", "cpu-2t"]
    assert "on cpu-2t" in run("trappm", "predict", *question)


def test_a_cluster_runs_with_the_wheel_and_postgresql(wheel, python, tmp_path):
    install(python, f"{wheel}[postgresql]")
    report = launched_and_left(python, tmp_path)
    assert len(report["trappm"]) == 3
    assert all(Path(path).is_relative_to(python.parents[1] / "lib") for path in report["trappm"])
