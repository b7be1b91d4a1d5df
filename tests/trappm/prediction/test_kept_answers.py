"""The same question is answered from what was kept, and any other one anew."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from onnx_export import export_onnx

import trappm
from trappm.prediction import kept_answers
from trappm.prediction.prediction import Prediction

ASKED = {
    "batch_size": 8, "input_size": 64, "device": "a100", "epochs": 2, "samples": 1000,
    "carbon_g_per_kwh": 300.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def entries(home):
    return sorted((home / "answers").glob("*.json"))


def ask(**others):
    return trappm.predict("test_resnet", **{**ASKED, **others})


def test_a_second_answer_is_the_first_one_and_needs_no_torch(home):
    first = ask()
    assert first.run.offers
    assert first.thriftiest
    (entry,) = entries(home)
    assert ask() == first
    assert type(ask().memory_source) is type(first.memory_source)
    assert Prediction.from_dict(json.loads(json.dumps(first.to_dict()))) == first
    code = (
        "import sys, trappm; "
        f"p = trappm.predict('test_resnet', **{ASKED!r}); "
        "heavy = {'torch', 'scipy', 'sqlalchemy', 'pandas', 'timm', 'onnx', 'ray'}; "
        "print(p); print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(first), "[]"]
    assert entries(home) == [entry]


def test_another_version_of_timm_makes_another_answer(home, monkeypatch):
    ask()
    monkeypatch.setattr(kept_answers, "tracing_versions", lambda: ("another",))
    ask()
    assert len(entries(home)) == 2


def test_a_snapshot_that_is_being_moved_keeps_nothing_and_is_answered_around(home):
    (home / "snapshots").mkdir(parents=True)
    (home / "snapshots" / "gone").symlink_to(home / "nowhere")
    assert ask().batch_size == ASKED["batch_size"]
    assert entries(home) == []


def test_what_an_answer_rests_on_makes_another_one(home):
    first = ask()
    assert ask(batch_size=9).batch_size == 9
    prices = (Path(kept_answers.__file__).parent / "prices.yaml").read_text()
    (home / "prices.yaml").write_text(prices.replace("lambda", "elsewhere"))
    assert {offer.cloud for offer in ask().run.offers} != {o.cloud for o in first.run.offers}
    count = len(entries(home))
    (home / "snapshots").mkdir()
    (home / "snapshots" / "new").write_text("a file of a snapshot")
    ask()
    assert len(entries(home)) == count + 1


def test_a_file_is_known_by_what_it_holds(home, tmp_path):
    path = tmp_path / "model.onnx"
    export_onnx("test_resnet", 64, path)
    resnet = trappm.predict(path, batch_size=4, device="a100")
    assert trappm.predict(path, batch_size=4, device="a100") == resnet
    export_onnx("test_vit", 64, path)
    assert trappm.predict(path, batch_size=4, device="a100").memory_mib != resnet.memory_mib


def test_a_damaged_answer_is_made_again(home):
    first = ask()
    (entry,) = entries(home)
    whole = entry.read_bytes()
    row = json.loads(whole)[0]
    for damage in (b"", b"{", b"null", b"[1]", json.dumps([{**row, "new": 1}]).encode()):
        entry.write_bytes(damage)
        assert ask() == first
        assert entry.read_bytes() == whole


def test_no_place_to_keep_answers_is_no_fault(home):
    home.mkdir()
    (home / "answers").write_text("in the way")
    assert ask() == ask()


def test_only_the_latest_answers_are_kept(home, monkeypatch):
    monkeypatch.setattr(kept_answers, "MOST", 2)
    for size in (1, 2, 3):
        ask(batch_size=size)
    assert len(entries(home)) == 2


def test_what_fails_is_kept_nowhere(home):
    with pytest.raises(trappm.TrappmError):
        ask(device="nothing")
    assert entries(home) == []


def test_lists_and_single_models_are_kept_apart(home):
    alone = ask()
    several = trappm.predict(["test_resnet", "test_vit"], **ASKED)
    assert trappm.predict(["test_resnet", "test_vit"], **ASKED) == several
    assert [p.model for p in several] == ["test_resnet", "test_vit"]
    assert several[0].step_time_ms == pytest.approx(alone.step_time_ms)
