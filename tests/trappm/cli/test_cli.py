"""The command line as a user meets it: help, bad input, one line of error, exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from trappm import cli


def _commands(group, path=()):
    yield list(path)
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, (*path, name))


COMMANDS = list(_commands(typer.main.get_command(cli.app)))


@pytest.fixture
def trappm(command, monkeypatch):
    """Run commands in this process, since a new one takes seconds to import timm."""

    def run(*arguments, home):
        monkeypatch.setenv("TRAPPM_HOME", str(home))
        monkeypatch.setenv("COLUMNS", "200")
        return subprocess.CompletedProcess(arguments, *command(*arguments))

    return run


def in_a_process(*arguments, home):
    return subprocess.run(
        [Path(sys.executable).with_name("trappm"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TRAPPM_HOME": str(home), "COLUMNS": "200"},
    )


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(trappm, home, words):
    result = trappm(*words, "--help", home=home)
    assert result.returncode == 0
    assert "Example: trappm" in result.stdout


def _small_campaign(tmp_path, **changes):
    import yaml

    data = {
        "name": "small",
        "devices": {"source": "cpu-2t"},
        "evaluation": {"source": 2},
        "initial": {"source": 4},
        "rounds": {"count": 0, "source": 0},
        "pool": {
            "groups": [
                {
                    "architectures": ["resnet10t", "resnet18"],
                    "batch_sizes": [1, 2, 4, 8],
                    "input_sizes": [64],
                }
            ]
        },
    } | changes
    path = tmp_path / "campaign.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["predict", "resnet188"], "did you mean"),
        (["predict", "resnet18", "--batch-size", "0"], "batch"),
        (["predict", "resnet18", "--batch-size", "99999999999999999999"], "1,000,000"),
        (["predict", "resnet18", "--input-size", "-3"], "input size"),
        (["predict", "resnet18", "--device", "gaudi2"], "unknown device 'gaudi2'"),
        (["predict", "resnet18", "--snapshot", "v3"], "no snapshot 'v3'"),
        (["predict", "none.onnx"], "none.onnx"),
        (["predict"], "MODEL"),
        (["snapshot", "pull"], "--to"),
        (["snapshot", "pull", "v3", "--to", "x"], "no snapshot 'v3'"),
        (["campaign", "launch"], "--preset laptop"),
        (["campaign", "launch", "none.yaml"], "none.yaml"),
        (["campaign", "launch", "--preset", "desktop"], "laptop"),
        (["campaign", "status", "--follow", "--json"], "--follow and --json"),
        (["campaign", "report", "--png", "map.png"], "--choices"),
        (["campaign", "resume", "--outcome", "timeout"], "--retry-failed"),
        (["campaign", "watch"], "use trappm campaign status --follow"),
        (["estimate", "resnet18"], "use trappm predict MODEL --breakdown"),
        (["device", "show", "a100"], "use trappm devices NAME"),
        (["predict", "resnet18", "--gpus", "2"], "use trappm scale MODEL --gpus N"),
        (["snapshot", "alias", "stable", "latest"], "use trappm snapshot push SNAPSHOT --alias"),
        (["ui"], "use trappm serve --open"),
        (["campaign", "ui"], "No such command 'ui'"),
        (["snapshot", "push", "default"], "--alias"),
        (["labels", "query", "--limit", "0"], "--limit"),
        (["lables"], "lables"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_reported_in_one_line_with_status_2(trappm, home, arguments, reason):
    result = trappm(*arguments, home=home)
    assert result.returncode == 2, result.stderr
    assert reason in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_unusable_data_folder_is_reported_only_where_it_is_needed(trappm, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    result = trappm("campaign", "resume", home=blocked / "home")
    assert result.returncode == 2
    assert "TRAPPM_HOME" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert trappm("predict", "test_resnet", home=blocked / "home").returncode == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sead": 1}, "did you mean 'seed'"),
        ({"devices": {"source": "a100"}}, "a100"),
        ({"devices": {"source": "v1000"}, "initial": {"source": 99}}, "did you mean 'v100'"),
        ({"initial": {"source": 99}}, "budget for cpu-2t cannot be met"),
        ({"stop": {"ends_at": "2020-01-01T00:00+00:00"}}, "it is past 2020-01-01"),
        (
            {"pool": {"groups": [{"architectures": ["resnet1o"], "batch_sizes": [1],
                                  "input_sizes": [64]}]}},
            "resnet1o",
        ),
    ],
    ids=["unknown key", "no such device", "misspelt device", "budget", "over",
         "unknown architecture"],
)  # fmt: skip
def test_faulty_campaign_files_are_refused_before_any_measurement(
    trappm, home, tmp_path, changes, reason
):
    result = trappm("campaign", "launch", _small_campaign(tmp_path, **changes), home=home)
    assert result.returncode == 2, result.stderr
    assert reason in result.stderr
    assert "campaign.yaml: " in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert json.loads(trappm("campaign", "status", "--json", home=home).stdout) == []


def test_validate_lists_every_fault_and_starts_nothing(trappm, home, tmp_path):
    faulty = {"sead": 1, "rounds": {"count": "many", "source": 2}}
    result = trappm("campaign", "validate", _small_campaign(tmp_path, **faulty), home=home)
    assert result.returncode == 2
    assert sorted(line.split(": ")[1] for line in result.stderr.splitlines()) == [
        "rounds.count", "sead",
    ]  # fmt: skip
    wrong = {"devices": {"source": "a100"}, "initial": {"source": 99}}
    result = trappm("campaign", "validate", _small_campaign(tmp_path, **wrong), home=home)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 2


def test_validate_shows_the_planned_measurements(trappm, home, tmp_path):
    result = trappm("campaign", "validate", _small_campaign(tmp_path), home=home)
    assert result.returncode == 0, result.stderr
    assert "pool: 8 configurations of 2 architectures" in result.stdout
    assert "cpu-2t: 2 evaluation, 4 initial" in result.stdout
    schema = json.loads(trappm("campaign", "validate", "--schema", home=home).stdout)
    assert "devices" in schema["required"]


def test_errors_set_the_exit_status_of_the_process(home):
    result = in_a_process("predict", "resnet188", home=home)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "did you mean" in result.stderr
    assert result.stdout == ""


def test_debug_shows_the_traceback(home, monkeypatch, capsys):
    monkeypatch.setenv("TRAPPM_HOME", str(home))
    monkeypatch.setattr(sys, "argv", ["trappm", "predict", "resnet188", "--debug"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "Traceback" in capsys.readouterr().err


def test_empty_lists_suggest_the_next_command(trappm, home):
    assert "trappm campaign launch" in trappm("campaign", "status", home=home).stdout
    assert json.loads(trappm("campaign", "status", "--json", home=home).stdout) == []
    (shipped,) = json.loads(trappm("snapshot", "show", "--json", home=home).stdout)
    assert shipped["aliases"] == ["default"]
    earlier = trappm("snapshot", "list", home=home)
    assert earlier.returncode == 2
    assert "'snapshot list' is gone; use trappm snapshot show" in earlier.stderr


def test_a_pulled_snapshot_comes_with_a_working_example(capsys, tmp_path):
    assert cli.run(["snapshot", "pull", "default", "--to", str(tmp_path / "copy")]) == 0
    command = capsys.readouterr().out.partition("Use it with: trappm ")[2]
    assert cli.run(command.split()) == 0
    assert capsys.readouterr().out.startswith("Fits A100 40 GB: ")
