"""`trappm snapshot` as two users of one registry see it."""

import json
import shutil

import pytest
from registry_samples import write_sample

import trappm
from trappm.cli import run
from trappm.learner.snapshots.registry import Registry
from trappm.prediction.selection import SHIPPED

SHARED_ID = json.loads((SHIPPED / "manifest.json").read_text())["id"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TRAPPM_REGISTRY", raising=False)
    return tmp_path / "home"


@pytest.fixture
def shared(tmp_path):
    return str(tmp_path / "shared")


@pytest.fixture
def snapshot_cli(home, capsys):
    def ask(*arguments, status=0):
        assert run(["snapshot", *map(str, arguments)]) == status
        out, err = capsys.readouterr()
        assert status == 0 or len(err.strip().splitlines()) == 1
        return out if status == 0 else err

    return ask


def test_a_pushed_snapshot_is_pulled_and_used_without_the_registry(snapshot_cli, home, shared):
    assert f"latest is {SHARED_ID}" in snapshot_cli("push", "default", "--registry", shared)
    assert SHARED_ID in snapshot_cli("show", "--registry", shared)
    snapshot_cli("pull", "--registry", shared)
    snapshot_cli("show", "latest")
    shutil.rmtree(shared)
    (row, default) = json.loads(snapshot_cli("show", "--json"))
    assert (row["id"], row["aliases"], default["aliases"]) == (SHARED_ID, ["latest"], ["default"])
    assert "a100-40gb" in snapshot_cli("show")
    by_name = trappm.predict("test_resnet", snapshot="latest", device="a100")
    assert by_name == trappm.predict("test_resnet", device="a100", snapshot=SHARED_ID[:6])
    assert "cannot be" in snapshot_cli("pull", "--registry", "nosuch://x", status=2)


def test_a_registry_is_pulled_from_and_predicts(snapshot_cli, home, shared):
    snapshot_cli("push", "default", "--registry", shared)
    by_location = trappm.predict("test_resnet", snapshot=shared, device="a100")
    assert Registry(home / "snapshots").ids() == [SHARED_ID]
    assert Registry(home / "snapshots").aliases() == {}  # only `pull` names what it fetched
    shutil.rmtree(home)
    out = snapshot_cli("pull", "--from", shared)
    assert f"snapshot {SHARED_ID} pulled to {home}" in out
    assert Registry(home / "snapshots").aliases() == {"latest": SHARED_ID}
    assert snapshot_cli("pull", "--from", shared, SHARED_ID[:8]) != ""
    assert by_location == trappm.predict("test_resnet", device="a100")
    assert run(["predict", "test_resnet", "--snapshot", "memory://nothing"]) == 2


def test_a_worse_snapshot_is_published_without_becoming_latest(snapshot_cli, home, shared):
    good, bad = (write_sample(home / "snapshots", n, m) for n, m in ((1, 5.0), (2, 9.0)))
    snapshot_cli("push", good, "--registry", shared)
    out = snapshot_cli("push", bad, "--registry", shared)
    assert f"latest stays {good}, since {bad} regressed: a100 train memory_mib" in out
    assert Registry(shared).ids() == sorted([good, bad])
    assert f"latest is {bad}" in snapshot_cli("push", bad, "--registry", shared, "--bound", "100")
    for _ in range(2):  # a repeated push changes nothing
        out = snapshot_cli("push", good, "--registry", shared, "--alias", "latest")
        assert f"latest is {good}" in out
    shown = snapshot_cli("show", "latest", "--registry", shared).split("history of latest\n")[1]
    assert [line.split()[0] for line in shown.splitlines()[2:]] == [good, bad, good]
    for registry in ((), ("--registry", shared)):
        refused = snapshot_cli("push", bad, "--alias", "default", *registry, status=2)
        assert "ships with trappm" in refused


def test_an_unusable_latest_is_reported_with_the_default_as_alternative(snapshot_cli, home, capsys):
    name = write_sample(home / "snapshots")  # without heads
    snapshot_cli("push", name, "--alias", "latest")
    words = ["predict", "test_resnet", "--device", "a100"]
    assert run(words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert name in line
    assert "--snapshot default" in line
    assert run([*words, "--snapshot", "default"]) == 0
