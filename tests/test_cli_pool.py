"""`trappm pool` as a user meets it: built, killed, gone on with, counted; and faulty files."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

ARCHITECTURES = [
    "test_resnet", "test_vit", "test_efficientnet", "test_convnext", "resnet10t", "test_vit2",
]  # fmt: skip


def group(**changes):
    return {"architectures": ["test_resnet"], "batch_sizes": [1], "input_sizes": [64]} | changes


class User:
    """One data folder, and the commands that are typed at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "TRAPPM_HOME": str(folder / "home"), "COLUMNS": "200"}

    def command(self, *arguments: str) -> list[str]:
        return [str(Path(sys.executable).with_name("trappm")), "pool", *arguments]

    def types(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=280, check=False,
            env=self.environment, cwd=self.folder,
        )  # fmt: skip

    def writes(self, data: object) -> str:
        (self.folder / "pool.yaml").write_text(yaml.safe_dump(data))
        return "pool.yaml"

    def profiled(self) -> dict[str, str | None]:
        """The graph hash of every architecture that is recorded, None for a refusal."""
        database = self.folder / "home" / "labels.db"
        if not database.exists():
            return {}
        try:
            with sqlite3.connect(database, timeout=30) as connection:
                query = "SELECT architecture, graph_hash FROM architecture_graphs"
                return dict(connection.execute(query).fetchall())
        except sqlite3.OperationalError:  # its tables are being made
            return {}

    def status(self, *arguments: str):
        return json.loads(self.types("status", *arguments, "--json").stdout)


@pytest.fixture
def user(tmp_path):
    return User(tmp_path)


def test_a_build_that_is_killed_goes_on_where_it_was(user):
    spec = user.writes({"name": "small", "groups": [group(
        architectures=ARCHITECTURES, batch_sizes=[1, 2], precisions=["fp32", "amp-fp16"]
    )]})  # fmt: skip
    process = subprocess.Popen(
        user.command("build", "--spec", spec, "--processes", "2"),
        env=user.environment, cwd=user.folder, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while len(user.profiled()) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline, "no graph is made"
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = user.profiled()
    assert 2 <= len(before) < len(ARCHITECTURES)
    gone, alive = psutil.wait_procs(workers, timeout=30)
    assert len(gone) >= 2
    assert alive == []

    total = user.status()["total"]
    assert total["configurations"] == 4 * len(ARCHITECTURES)
    assert total["graphs"] == total["step_profiles"] == len(before)
    assert total["to_do"] == len(ARCHITECTURES) - len(before)
    assert "still to be made" in user.types("status").stdout

    result = user.types("build", "--spec", spec, "--processes", "2")
    assert result.returncode == 0, result.stderr
    assert f"static profiles: {len(before)} of {len(ARCHITECTURES)} are there" in result.stdout
    after = user.profiled()
    assert set(after) == set(ARCHITECTURES)
    assert None not in after.values()
    assert before.items() <= after.items()
    again = user.types("build", "--spec", spec)
    assert f"{len(ARCHITECTURES)} of {len(ARCHITECTURES)} are there" in again.stdout


def test_a_ctrl_c_leaves_what_was_made_and_tells_how_far_it_is(user):
    spec = user.writes({"name": "small", "groups": [group(architectures=ARCHITECTURES)]})
    process = subprocess.Popen(
        user.command("build", "--spec", spec, "--processes", "1"),
        env=user.environment, cwd=user.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not user.profiled():
        assert process.poll() is None
        assert time.monotonic() < deadline, "no graph is made"
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    made = len(user.profiled())
    assert 1 <= made < len(ARCHITECTURES)
    assert told == (
        f"trappm: interrupted with {made} of {len(ARCHITECTURES)} static profiles made; "
        "the same command goes on\n"
    )
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def test_what_was_refused_is_tried_again_on_request(user):
    spec = user.writes({"name": "small", "groups": [group()]})
    assert user.types("build", "--spec", spec).returncode == 0
    with sqlite3.connect(user.folder / "home" / "labels.db") as connection:
        connection.execute(
            "UPDATE step_profiles SET refusal = 'too new', profile = NULL, frozen_parameters = NULL"
            ", trainable_parameters = NULL, saved_bytes_constant = NULL"
            ", saved_bytes_per_sample = NULL"
        )
    assert user.types("build", "--spec", spec).returncode == 0
    facts = user.status()
    assert facts["step_refusals"] == [
        {"count": 1, "reason": "too new", "architectures": ["test_resnet"]}
    ]
    assert (facts["total"]["steps_refused"], facts["total"]["to_do"]) == (1, 0)
    assert "too new" in user.types("status").stdout
    assert user.types("build", "--spec", spec, "--retry-refused").returncode == 0
    facts = user.status()
    assert facts["step_refusals"] == []
    assert facts["total"]["step_profiles"] == 1


def test_refusals_are_counted_and_told_by_reason(user):
    spec = user.writes({"name": "some", "groups": [
        group(architectures=["test_vit", "test_vit2"], input_sizes=[64, 67], batch_sizes=[1, 2]),
        group(architectures=["test_resnet"]),
    ]})  # fmt: skip
    result = user.types("build", "--spec", spec, "--processes", "1")
    assert result.returncode == 0, result.stderr
    facts = user.status("some")
    by_family = {row["family"]: row for row in facts["families"]}
    assert by_family["vit"]["configurations"] == 8
    assert by_family["vit"]["architectures"] == 2
    assert by_family["resnet"]["usable"] == by_family["resnet"]["configurations"] == 1
    total = facts["total"]
    assert total["graphs"] + total["refused"] == 5
    assert total["step_profiles"] + total["steps_refused"] == total["graphs"]
    assert total["refused"] > 0
    assert total["to_do"] == 0
    assert sum(refusal["count"] for refusal in facts["refusals"]) == total["refused"]
    for refusal in facts["refusals"]:
        assert refusal["reason"]
        assert all(name.startswith("test_vit") for name in refusal["architectures"])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"name": "a", "groups": [group(batch_size=[1])]}, "did you mean 'batch_sizes'"),
        ({"nam": "a", "groups": [group()]}, "did you mean 'name'"),
        ({"name": "a", "groups": [group(families=["resnett"])]}, "did you mean 'resnet'"),
        ({"name": "a", "groups": [group(architectures=["resnet_zz*"])]}, "'resnet_zz*'"),
        ({"name": "a", "groups": [group(architectures=["resnet118"])]}, "did you mean"),
        ({"name": "a", "groups": [group(architectures=[])]}, "neither architectures nor families"),
        ({"name": "a", "groups": [group(batch_sizes=[])]}, "batch_sizes is empty"),
        ({"name": "a", "groups": [group(batch_sizes=[0])]}, "batch_sizes holds 0"),
        ({"name": "a", "groups": [group(batch_sizes=[2.5])]}, "batch_sizes"),
        ({"name": "a", "groups": [group(input_sizes=["nativ"])]}, "native"),
        ({"name": "a", "groups": [group(precisions=["fp8"])]}, "fp32"),
        ({"name": "a", "groups": []}, "no groups"),
        ({"name": "../a", "groups": [group()]}, "name"),
        ({"name": "a"}, "groups"),
        ([], "mapping"),
    ],
)  # fmt: skip
def test_a_faulty_file_is_told_in_one_line_and_changes_nothing(user, data, told):
    result = user.types("build", "--spec", user.writes(data))
    assert result.returncode == 2, result.stderr
    assert told in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert user.profiled() == {}
    assert user.status() is None


def test_what_is_not_there_is_told(user):
    assert "none.yaml" in user.types("build", "--spec", "none.yaml").stderr
    assert "--spec" in user.types("build").stderr
    result = user.types("status", "paper")
    assert result.returncode == 2
    assert "trappm pool build" in result.stderr
    assert "trappm pool build" in user.types("status").stdout
