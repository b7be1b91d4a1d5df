"""`trappm pool` as a user meets it: built, interrupted, gone on with, counted; and faulty files."""

from __future__ import annotations

import sqlite3
from dataclasses import asdict

import pytest
import yaml

from trappm.cluster import pool_file, trace_tasks
from trappm.label_store import store_or_none_yet
from trappm.profiler.errors import InputError
from trappm.reports.pools import pool_facts
from trappm.store import Home

ARCHITECTURES = ["test_resnet", "test_vit", "test_efficientnet", "test_convnext"]


def group(**changes):
    return {"architectures": ["test_resnet"], "batch_sizes": [1], "input_sizes": [64]} | changes


class User:
    """One data folder, and what its store has."""

    def __init__(self, folder):
        self.folder = folder

    def writes(self, data):
        (self.folder / "pool.yaml").write_text(yaml.safe_dump(data))

    def traced(self):
        """The graph hash of every step that is recorded, None for a refusal."""
        database = self.folder / "home" / "labels.db"
        if not database.exists():
            return {}
        try:
            with sqlite3.connect(database, timeout=30) as connection:
                query = "SELECT architecture, precision, graph_hash FROM traces"
                return {(name, how): graph for name, how, graph in connection.execute(query)}
        except sqlite3.OperationalError:  # its tables are being made
            return {}

    def facts(self, name="small"):
        """Counts of a pool."""
        with store_or_none_yet(Home.find()) as store:
            return asdict(pool_facts(store, name))


@pytest.fixture
def user(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return User(tmp_path)


def test_an_interrupted_build_is_continued(user, command, printed, traces_here, monkeypatch):
    user.writes({"name": "small", "groups": [group(
        architectures=ARCHITECTURES, batch_sizes=[1, 2], precisions=["fp32", "amp-fp16"]
    )]})  # fmt: skip

    def interrupted(keys, **_):
        yield trace_tasks.trace_of(keys[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool_file, "TraceTasks", interrupted)
        assert command("pool build --spec pool.yaml --processes 1")[0] == 130
    before, count = user.traced(), 2 * len(ARCHITECTURES)
    assert len(before) == 1
    total = user.facts()["total"]
    assert (total["traced"], total["to_do"]) == (len(before), count - len(before))
    shown = printed("pool build --spec pool.yaml --processes 1")
    assert f"traced steps: {len(before)} of {count} are there" in shown
    after = user.traced()
    assert set(after) == {(name, how) for name in ARCHITECTURES for how in ("fp32", "amp-fp16")}
    assert None not in after.values()
    assert before.items() <= after.items()
    assert f"{count} of {count} are there" in printed("pool build --spec pool.yaml")


def test_refusals_are_counted_by_reason_and_retried_on_request(user, printed, traces_here):
    user.writes({"name": "small", "groups": [
        group(architectures=["test_vit"], input_sizes=[64, 67], batch_sizes=[1, 2]),
        group(architectures=["test_resnet"]),
    ]})  # fmt: skip
    printed("pool build --spec pool.yaml --processes 1")
    facts = user.facts()
    vit = next(row for row in facts["families"] if row["family"] == "vit")
    counts = vit["configurations"], vit["usable"], vit["refused"], vit["architectures"]
    assert counts == (4, 2, 1, 1)
    total = facts["total"]
    assert (total["steps"], total["traced"], total["refused"], total["to_do"]) == (3, 2, 1, 0)
    (refused,) = facts["refusals"]
    assert "67" in refused["reason"]
    assert (refused["count"], refused["architectures"]) == (1, ["test_vit"])

    with sqlite3.connect(user.folder / "home" / "labels.db") as connection:
        connection.execute(
            "UPDATE traces SET refusal = 'too new' WHERE architecture = 'test_resnet'"
        )
    again = printed("pool build --spec pool.yaml")
    assert "too new" in again
    assert "traced steps: 3 of 3 are there" in again
    facts = user.facts()
    too_new = {"count": 1, "reason": "too new", "architectures": ["test_resnet"]}
    assert facts["step_refusals"] == [too_new]
    assert (facts["total"]["steps_refused"], facts["total"]["to_do"]) == (1, 0)
    retried = printed("pool build --spec pool.yaml --processes 1 --retry-refused")
    assert "traced steps: 1 of 3 are there" in retried
    facts = user.facts()
    assert (facts["step_refusals"], facts["total"]["traced"]) == ([], 2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"name": "a", "groups": [group(batch_size=[1])]}, "did you mean 'batch_sizes'"),
        ({"name": "a", "groups": [group(architectures=["resnet_zz*"])]}, "'resnet_zz*'"),
        ({"name": "a", "groups": [group(batch_sizes=[0])]}, "batch_sizes holds 0"),
    ],
)  # fmt: skip
def test_faulty_pool_files_are_reported_in_one_line(user, refusal, data, reason):
    user.writes(data)
    assert reason in refusal("pool build --spec pool.yaml")
    assert user.traced() == {}
    with pytest.raises(InputError, match="trappm pool build"):
        user.facts()


def test_a_missing_pool_file_is_reported(user, refusal):
    assert "none.yaml" in refusal("pool build --spec none.yaml")
    assert "--spec" in refusal("pool build")
