"""Everything with a live bar, as it is typed: in a terminal of 80 columns."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import TextColumn
from terminal import COLUMNS, Terminal

from trappm.terminal.progress_bars import LiveBar

TRAPPM = Path(sys.executable).with_name("trappm")
pytestmark = pytest.mark.timeout(900)


def test_ctrl_c_ends_a_build_and_explains_how_to_continue(tmp_path):
    (tmp_path / "pool.yaml").write_text(
        "name: large\ngroups:\n- architectures: [resnet*, vit_*]\n"
        "  batch_sizes: [1]\n  input_sizes: [224]\n"
    )
    terminal = Terminal(
        [TRAPPM, "pool", "build", "--spec", "pool.yaml", "--processes", "1"],
        env={**os.environ, "TRAPPM_HOME": str(tmp_path / "home")}, cwd=tmp_path,
    )  # fmt: skip
    terminal.wait_for("traced steps")
    terminal.type("\x03")
    assert terminal.wait(120) == 130, terminal.raw
    assert "the same command continues" in terminal.raw  # the screen may break the line
    assert "display failed" not in terminal.raw
    assert "Traceback" not in terminal.raw


@pytest.fixture
def screen(monkeypatch):
    """What bars write, on a screen of 80 columns."""
    file = io.StringIO()
    on_screen(monkeypatch, file, COLUMNS)
    return file


def on_screen(monkeypatch, file, columns):
    console = Console(file=file, force_terminal=True, width=columns)
    monkeypatch.setattr("trappm.terminal.progress_bars.console", lambda: console)
    return console


def test_a_failing_display_does_not_stop_the_work(screen, monkeypatch, capsys):
    console = on_screen(monkeypatch, screen, COLUMNS)
    with LiveBar(TextColumn("{task.total:.0f}"), to=console) as bar:
        bar._safely(lambda: bar._bar.add_task("", total=None))
        bar._safely(lambda: bar._console.print("news"))
    assert "news" in screen.getvalue()
    message = capsys.readouterr().err
    assert message.count("the display failed") == 1
    assert "the work continues" in message


CAMPAIGN = """
import sys
from trappm.cluster.campaign.process import Progress
from trappm.cluster.spec import load_preset
from trappm.store.records import Activity
from trappm.terminal.progress_bars import CampaignDisplay
with CampaignDisplay("1a2b3c4d", load_preset("laptop"), "laptop", 1) as display:
    for done in range(1000):
        display.show(Progress(Activity(stage="measuring", done=done, total=1000), ("news",)))
print("measured all", file=sys.stderr)
"""


def test_a_closed_pipe_does_not_stop_a_campaign(tmp_path):
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
