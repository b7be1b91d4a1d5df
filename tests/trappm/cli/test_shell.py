"""What a shell sees: words completed, help, an output that cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trappm.cli import run, shell
from trappm.store import Home, Store

TRAPPM = Path(sys.executable).with_name("trappm")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = Home(tmp_path_factory.mktemp("home"))
    with Store.open(home.database_url) as store:
        ids = [store.campaigns.create(name, {"devices": {}}, 1).id for name in ("one", "two")]
    return home, ids


def completed(home, line):
    words = line.split(" ")
    done = subprocess.run(
        [TRAPPM], capture_output=True, text=True, check=False, timeout=120,
        env={
            **os.environ, "TRAPPM_HOME": str(home.path), "_TRAPPM_COMPLETE": "complete_bash",
            "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1),
        },
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trappm predict efficientnet_b0", {"efficientnet_b0", "efficientnet_b0_g8_gn"}),
        ("trappm predict resnet18 --device al", set()),
    ],
)
def test_words_are_completed(home, line, words):
    shown = set(completed(home[0], line))
    assert words <= shown
    assert words or not shown


def test_completion_never_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "nowhere"))
    assert shell.campaigns("") == []
    (tmp_path / "nowhere").write_text("a file")
    assert shell.campaigns("") == []
    assert shell.snapshots("") == ["default"]


def test_campaigns_are_found_by_the_beginning_of_their_id(home, monkeypatch, capsys):
    folder, (first, second) = home
    monkeypatch.setenv("TRAPPM_HOME", str(folder.path))
    same = next(
        at for at, letters in enumerate(zip(first, second, strict=True)) if len({*letters}) > 1
    )
    with Store.open(folder.database_url) as store:
        assert store.campaigns.get(first[: same + 1]).id == first
        assert store.campaigns.get(second).id == second
    assert run(["labels", "query", "--campaign", first[: same + 1], "--json"]) == 0
    capsys.readouterr()
    assert run(["labels", "query", "--campaign", "nothing"]) == 2
    assert "knows no campaign 'nothing'" in capsys.readouterr().err


def test_an_unwritable_output_is_reported_in_one_line(home):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [TRAPPM, "--help"], stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TRAPPM_HOME": str(home[0].path)}, check=False, timeout=300,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == ("trappm: error: the output cannot be written: No space left on device\n")
