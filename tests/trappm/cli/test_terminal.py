"""Everything with a live bar, as it is typed: in a terminal of 80 columns."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import TextColumn
from terminal import COLUMNS, Terminal
from test_cli_evaluate import write_sheet

from trappm.cluster.campaign.progress import Progress
from trappm.cluster.spec import load_preset
from trappm.terminal.campaign_display import Display
from trappm.terminal.progress_bar import LiveBar

TRAPPM = Path(sys.executable).with_name("trappm")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of work with a label sheet and a pool file, and its data folder."""
    folder = tmp_path_factory.mktemp("terminal")
    write_sheet(folder / "sheet.csv", ["test_resnet", "test_vit", "test_efficientnet", "test_vit2"])
    (folder / "pool.yaml").write_text(
        "name: two\ngroups:\n- architectures: [test_resnet, test_vit]\n"
        "  batch_sizes: [1, 2]\n  input_sizes: [64]\n"
    )
    return folder


@pytest.mark.parametrize(
    ("command", "bar", "answer"),
    [
        ("pool build --spec pool.yaml --processes 1", r"/2 +\d:\d\d:\d\d", "configurations"),
        (
            "evaluate --labels sheet.csv --metric memory --estimator faketensor --split families "
            "--seeds 2",
            r"\d+/\d+ +\d:\d\d:\d\d to go",
            "MAPE",
        ),
        (
            "tune --labels sheet.csv --metric memory --estimator xgboost --trials 2 --processes 1",
            r"\d+/\d+ +\d:\d\d:\d\d to go",
            "2 trials completed",
        ),
        (
            "campaign replay --labels sheet.csv --metric memory --strategy random --budget 5 "
            "--seeds 1",
            r"\d+/\d+ +\d:\d\d:\d\d to go",
            "random",
        ),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else None,
)
def test_a_command_with_a_bar_runs_in_a_terminal(folder, command, bar, answer):
    terminal = Terminal(
        [TRAPPM, *command.split()],
        env={**os.environ, "TRAPPM_HOME": str(folder / "home")}, cwd=folder,
    )  # fmt: skip
    assert terminal.wait(600) == 0, terminal.raw
    assert "display failed" not in terminal.raw
    assert re.search(bar, terminal.frames), terminal.raw
    assert answer in terminal.raw


def test_ctrl_c_ends_a_build_in_a_terminal_and_says_how_to_go_on(tmp_path):
    (tmp_path / "pool.yaml").write_text(
        "name: large\ngroups:\n- architectures: [resnet*, vit_*]\n"
        "  batch_sizes: [1]\n  input_sizes: [224]\n"
    )
    terminal = Terminal(
        [TRAPPM, "pool", "build", "--spec", "pool.yaml", "--processes", "1"],
        env={**os.environ, "TRAPPM_HOME": str(tmp_path / "home")}, cwd=tmp_path,
    )  # fmt: skip
    terminal.wait_for("static profiles")
    terminal.type("\x03")
    assert terminal.wait(120) == 130, terminal.raw
    assert "the same command goes on" in terminal.screen
    assert "Traceback" not in terminal.raw


@pytest.fixture
def screen():
    return io.StringIO()


def on(screen, *columns):
    return LiveBar(*columns, to=Console(file=screen, force_terminal=True, width=COLUMNS))


def test_a_bar_that_cannot_be_drawn_is_told_and_ends_nothing(screen, capsys):
    with on(screen, TextColumn("{task.total:.0f}")) as bar:
        bar._safely(lambda: bar._bar.add_task("", total=None))
        bar._safely(lambda: bar._console.print("news"))
    assert "news" in screen.getvalue()
    told = capsys.readouterr().err
    assert told.count("the display failed") == 1
    assert "the work goes on" in told


CAMPAIGN = """
import sys
from trappm.cluster.campaign.progress import Progress
from trappm.cluster.spec import load_preset
from trappm.terminal.campaign_display import Display
with Display("1a2b3c4d", load_preset("laptop")) as display:
    for done in range(1000):
        display.show(Progress(stage="measuring", done=done, total=1000, lines=("news",)))
print("measured all", file=sys.stderr)
"""


def test_a_reader_that_is_gone_ends_nothing(tmp_path):
    """As `make campaign | head -1`."""
    with (tmp_path / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", CAMPAIGN], stdout=subprocess.PIPE, stderr=errors
        )
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
        errors.seek(0)
        assert "measured all" in errors.read()


@pytest.mark.parametrize("total", [0, 82])
def test_a_campaign_s_bar_fits_a_screen_of_80_columns(screen, monkeypatch, total):
    console = Console(file=screen, force_terminal=True, width=COLUMNS)
    monkeypatch.setattr("trappm.terminal.progress_bar.console", lambda: console)
    with Display("1a2b3c4d", load_preset("laptop")) as display:
        display.show(
            Progress(
                stage="measuring, round 12 of 14", done=12 if total else 0, total=total,
                eta_s=3599, current=("cpu-2t: mobilenetv4_conv_small_035 batch 4 at 224 px",) * 3,
            )
        )  # fmt: skip
        display._bar.refresh()
    bar = f"12/{total}" if total else "0/?"
    shown = [line for line in re.split(r"[\r\n]", screen.getvalue()) if bar in line][-1]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "59:59 to go" in plain
    assert len(plain) <= COLUMNS
