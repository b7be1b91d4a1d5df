"""`trappm pool` as a user meets it: built, killed, gone on with, counted; and faulty files."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import trappm.cluster.pool_file
from trappm.cluster.profiles import profile_graph
from trappm.label_store import store_or_none_yet
from trappm.reports.pools import pool_facts
from trappm.store import Home

ARCHITECTURES = [
    "test_resnet", "test_vit", "test_efficientnet", "test_convnext", "resnet10t", "test_vit2",
]  # fmt: skip


def group(**changes):
    return {"architectures": ["test_resnet"], "batch_sizes": [1], "input_sizes": [64]} | changes


class User:
    """One data folder, and the commands that are typed at it."""

    def __init__(self, folder, command):
        self.folder = folder
        self._command = command

    def types(self, *arguments):
        """Runs a command here, which is quick."""
        return subprocess.CompletedProcess(arguments, *self._command("pool", *arguments))

    @contextlib.contextmanager
    def builds(self, *arguments):
        """A build in a process of its own, as soon as it has made a profile."""
        process = subprocess.Popen(
            [Path(sys.executable).with_name("trappm"), "pool", "build", *arguments],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
            # Whoever runs the tests in the background may have told them to ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 250
            while not self.profiled():
                assert process.poll() is None
                assert time.monotonic() < deadline, "no graph is made"
                time.sleep(0.02)
            yield process
        finally:
            process.kill()
            process.communicate()

    def writes(self, data):
        (self.folder / "pool.yaml").write_text(yaml.safe_dump(data))
        return "pool.yaml"

    def profiled(self):
        """The graph hash of every architecture that is recorded, None for a refusal."""
        database = self.folder / "home" / "labels.db"
        if not database.exists():
            return {}
        try:
            with sqlite3.connect(database, timeout=30) as connection:
                query = "SELECT architecture, graph_hash FROM static_profiles"
                return dict(connection.execute(query).fetchall())
        except sqlite3.OperationalError:  # its tables are being made
            return {}

    def facts(self, name=None):
        """Counts of a pool; None if there is none."""
        with store_or_none_yet(Home.find()) as store:
            names = [name] if name else [pool.name for pool in store.pools.all()]
            return pool_facts(store, names[0]).to_json() if names else None


@pytest.fixture
def user(tmp_path, monkeypatch, command):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return User(tmp_path, command)


@pytest.fixture
def at_once(monkeypatch):
    """Builds that are typed here make profiles here: starting processes for them takes longer."""
    monkeypatch.setattr(
        trappm.cluster.pool_file,
        "_profiled",
        lambda pairs, address, processes: (profile_graph(*pair) for pair in pairs),
    )


def test_a_killed_build_is_continued(user, at_once):
    spec = user.writes({"name": "small", "groups": [group(
        architectures=ARCHITECTURES, batch_sizes=[1, 2], precisions=["fp32", "amp-fp16"]
    )]})  # fmt: skip
    with user.builds("--spec", spec, "--processes", "1") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = user.profiled()
    assert 1 <= len(before) < len(ARCHITECTURES)
    total = user.facts()["total"]
    assert total["configurations"] == 4 * len(ARCHITECTURES)
    assert total["graphs"] == total["step_profiles"] == len(before)
    assert total["to_do"] == len(ARCHITECTURES) - len(before)

    result = user.types("build", "--spec", spec, "--processes", "1")
    assert result.returncode == 0, result.stderr
    assert f"static profiles: {len(before)} of {len(ARCHITECTURES)} are there" in result.stdout
    after = user.profiled()
    assert set(after) == set(ARCHITECTURES)
    assert None not in after.values()
    assert before.items() <= after.items()
    again = user.types("build", "--spec", spec)
    assert f"{len(ARCHITECTURES)} of {len(ARCHITECTURES)} are there" in again.stdout


def test_refusals_are_counted_by_reason_and_retried_on_request(user, at_once):
    spec = user.writes({"name": "some", "groups": [
        group(architectures=["test_vit"], input_sizes=[64, 67], batch_sizes=[1, 2]),
        group(architectures=["test_resnet"]),
    ]})  # fmt: skip
    result = user.types("build", "--spec", spec, "--processes", "1")
    assert result.returncode == 0, result.stderr
    facts = user.facts("some")
    by_family = {row["family"]: row for row in facts["families"]}
    assert by_family["vit"]["configurations"] == 4
    assert by_family["vit"]["usable"] == 2
    assert by_family["vit"]["refused"] == by_family["vit"]["architectures"] == 1
    assert by_family["resnet"]["usable"] == by_family["resnet"]["configurations"] == 1
    total = facts["total"]
    assert (total["graphs"], total["step_profiles"], total["refused"]) == (2, 2, 1)
    assert (total["steps_refused"], total["to_do"]) == (0, 0)
    (refusal,) = facts["refusals"]
    assert refusal["count"] == 1
    assert "67" in refusal["reason"]
    assert refusal["architectures"] == ["test_vit"]

    with sqlite3.connect(user.folder / "home" / "labels.db") as connection:
        connection.execute(
            "UPDATE static_profiles SET step_refusal = 'too new', step = NULL "
            "WHERE architecture = 'test_resnet'"
        )
    again = user.types("build", "--spec", spec)
    assert "too new" in again.stdout
    assert "static profiles: 3 of 3 are there" in again.stdout
    facts = user.facts()
    assert facts["step_refusals"] == [
        {"count": 1, "reason": "too new", "architectures": ["test_resnet"]}
    ]
    assert (facts["total"]["steps_refused"], facts["total"]["to_do"]) == (1, 0)
    retried = user.types("build", "--spec", spec, "--processes", "1", "--retry-refused")
    assert retried.returncode == 0
    assert "static profiles: 1 of 3 are there" in retried.stdout
    facts = user.facts()
    assert facts["step_refusals"] == []
    assert len(facts["refusals"]) == 1
    assert facts["total"]["step_profiles"] == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"name": "a", "groups": [group(batch_size=[1])]}, "did you mean 'batch_sizes'"),
        ({"name": "a", "groups": [group(families=["resnett"])]}, "did you mean 'resnet'"),
        ({"name": "a", "groups": [group(architectures=["resnet_zz*"])]}, "'resnet_zz*'"),
        ({"name": "a", "groups": [group(architectures=[])]}, "neither architectures nor families"),
        ({"name": "a", "groups": [group(batch_sizes=[])]}, "batch_sizes is empty"),
        ({"name": "a", "groups": [group(batch_sizes=[0])]}, "batch_sizes holds 0"),
        ({"name": "a", "groups": [group(input_sizes=["nativ"])]}, "native"),
        ({"name": "a", "groups": []}, "no groups"),
        ({"name": "../a", "groups": [group()]}, "name"),
        ([], "mapping"),
    ],
)  # fmt: skip
def test_faulty_pool_files_are_reported_in_one_line(user, data, reason):
    result = user.types("build", "--spec", user.writes(data))
    assert result.returncode == 2, result.stderr
    assert reason in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert user.profiled() == {}
    assert user.facts() is None


def test_a_missing_pool_file_is_reported(user):
    assert "none.yaml" in user.types("build", "--spec", "none.yaml").stderr
    assert "--spec" in user.types("build").stderr
