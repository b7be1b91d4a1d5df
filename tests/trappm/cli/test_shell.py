"""What a shell sees: words completed, commands grouped by task, help that fits 80 columns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import Terminal
from typer.main import get_command

from trappm.cli import app, run, shell
from trappm.store import Home, Store
from trappm.terminal.tables import print_table

TRAPPM = Path(sys.executable).with_name("trappm")
DATA_FOLDER = "~/.local/share/trappm"


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
        ("trappm sna", {"snapshot"}),
        ("trappm predict efficientnet_b0", {"efficientnet_b0", "efficientnet_b0_g8_gn"}),
        ("trappm predict resnet18 --device v100", {"v100", "v100-16gb", "v100s"}),
        ("trappm predict resnet18 --device nothing", set()),
        ("trappm predict resnet18 --device al", set()),
        ("trappm compare resnet18 --device al", {"all"}),
    ],
)
def test_words_are_completed(home, line, words):
    shown = set(completed(home[0], line))
    assert words <= shown
    assert words or not shown


def test_campaigns_are_completed(home):
    folder, ids = home
    assert set(completed(folder, "trappm campaign status ")) >= set(ids)
    assert completed(folder, f"trappm campaign status {ids[0][:6]}") == [ids[0]]


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
    assert run(["campaign", "status", "nothing"]) == 2
    assert "no campaign 'nothing'" in capsys.readouterr().err


def test_every_command_is_in_a_help_panel_of_its_task(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert f"TRAPPM_HOME (default: {DATA_FOLDER})" in " ".join(out.split())
    panels = re.findall(r"^╭─ (.+?) ─+╮", out, re.MULTILINE)
    tasks = {"Predict", "Measure", "Serve", "Labels and snapshots"}
    assert {*panels} <= {"Options", *tasks}  # a command without a group is under "Commands"


@pytest.mark.parametrize("command", ["--help", "predict test_resnet --device a100"])
def test_an_unwritable_output_is_reported_in_one_line(home, command):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [TRAPPM, *command.split()], stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TRAPPM_HOME": str(home[0].path)}, check=False, timeout=300,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == ("trappm: error: the output cannot be written: No space left on device\n")


def test_a_closed_output_is_reported_in_one_line(home):
    done = subprocess.run(
        ["bash", "-c", 'exec "$0" --version >&-', TRAPPM], capture_output=True, text=True,
        env={**os.environ, "TRAPPM_HOME": str(home[0].path)}, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "trappm: error: standard output is closed; redirect it, for example to /dev/null\n"
    )


def test_measure_shows_its_progress(tmp_path):
    options = "measure test_resnet --batch-size 1 --input-size 64 --device cpu-1t --protocol quick"
    command = [sys.executable, "-c", "from trappm.cli import main; main()", *options.split()]
    terminal = Terminal(command, columns=120, env=os.environ, cwd=tmp_path)
    ended = terminal.wait(280)  # 1 on a host that others keep busy
    assert ended == 0 or "cpu-1t: unstable" in terminal.raw, terminal.raw
    lines = re.findall(r"^ +[\d.]+ s  (.*?)\r?$", terminal.raw, re.MULTILINE)
    assert lines[0].startswith("test_resnet batch 1 at 64 px on cpu-1t: ")
    assert lines[1:4] == ["creating the model", "warming up", "timing steps"]


def test_tables_in_files_wrap_no_words(capsys):
    wide = "vit_wee_patch16_reg1_gap_256 batch 8 at 96 px"
    print_table("", ("configuration", *(f"reason {i}" for i in range(12))), [(wide, *[1.5] * 12)])
    heading, _, row = capsys.readouterr().out.splitlines()
    assert heading.startswith("configuration")
    assert row.startswith(wide)


def test_help_has_an_example_and_placeholders_in_uppercase(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    commands = [([], get_command(app))]
    for path, command in commands:  # the list grows as groups are met
        commands += [
            ([*path, name], subcommand)
            for name, subcommand in getattr(command, "commands", {}).items()
        ]
        assert run([*path, "--help"]) == 0
        shown = capsys.readouterr().out
        assert "Example: trappm" in shown
        (usage,) = re.findall(r"Usage: (?:trappm ?)(.*)", shown)
        placeholders = usage.removeprefix(" ".join(path))
        assert placeholders == placeholders.upper(), usage
        assert max(map(len, shown.splitlines())) <= 80
    assert len(commands) > 20
