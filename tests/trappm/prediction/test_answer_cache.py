"""Repeated questions are answered from a cache, and an entry ends with what it depends on."""

import subprocess
import sys

import pytest
from snapshot_samples import publish, shipped_heads

import trappm
from trappm.prediction.prediction import Prediction
from trappm.profiler.errors import TrappmError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    return tmp_path


def entries(home):
    return sorted((home / "answers").glob("*.json"))


def ask(**options):
    return trappm.predict("test_resnet", **({"device": "a100", "batch_size": 4} | options))


def test_repeated_questions_use_the_cached_answer(home):
    first = ask(epochs=2, samples=1000)
    assert ask(epochs=2, samples=1000) == first
    assert Prediction.from_dict(first.to_dict()) == first
    assert len(entries(home)) == 1
    assert ask(epochs=2, samples=1000).memory_breakdown.total_mib > 0
    ask(epochs=3, samples=1000)
    assert len(entries(home)) == 2


def test_a_repeated_refusal_needs_no_torch(home):
    """The first needs a trace: of patches larger than the image."""
    model, settings = "test_vit", {"input_size": 7}
    with pytest.raises(TrappmError) as first:
        trappm.predict(model, device="a100", **settings)
    code = (
        "import sys, trappm\n"
        f"try: trappm.predict({model!r}, device='a100', **{settings!r})\n"
        "except trappm.TrappmError as error: print(type(error).__name__, error)\n"
        "print('torch' in sys.modules)\n"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert again.stdout == f"{type(first.value).__name__} {first.value}\nFalse\n"


def test_damaged_entries_are_replaced(home):
    first = ask()
    (path,) = entries(home)
    path.write_text("[{}]")
    assert ask() == first


def test_a_new_snapshot_invalidates_cached_answers(home):
    before = ask()
    made = publish(home / "snapshots", {"a100-40gb": shipped_heads("a100-40gb")})
    assert before.snapshot != ask().snapshot == made


def test_predictions_work_without_a_writable_cache(home):
    (home / "answers").write_text("in the way")
    assert ask() == ask()
