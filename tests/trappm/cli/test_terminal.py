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

from trappm.cluster.campaign.process import Progress
from trappm.cluster.spec import load_preset
from trappm.cluster.trace_tasks import Traced
from trappm.profiler.traced_step import Refusal, TraceKey
from trappm.store.records import Activity
from trappm.terminal.progress_bars import BuildDisplay, CampaignDisplay, LiveBar

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


LONG_NAME = "efficientvit_l3_with_a_name_of_nobody.r384_in1k"


def campaign_bar(**counts):
    with CampaignDisplay("1a2b3c4d", load_preset("laptop"), "laptop", 1) as display:
        current = (f"cpu-2t: {LONG_NAME} batch 4 at 224 px",) * 3
        stage = "measuring, round 12 of 14"
        display.show(Progress(Activity(stage=stage, eta_s=3599, current=current, **counts)))
        display._bar.refresh()


def pool_bar():
    with BuildDisplay() as display:
        display.show(0, 82, None)
        display.show(12, 82, Traced(TraceKey(LONG_NAME, 224), Refusal("no reason")))
        display._bar.refresh()


def test_stages_without_counts_keep_the_bar(screen):
    with CampaignDisplay("1a2b3c4d", load_preset("laptop"), "laptop", 1) as display:
        display.show(Progress(Activity(stage="measuring", done=82, total=82)))
        display.show(
            Progress(Activity(stage="learning", done=2, total=6))
        )  # and its end is not seen
        for stage in ("publishing", "finished"):
            display.show(Progress(Activity(stage=stage)))
            display._bar.refresh()
    lines = [line for line in re.split(r"[\r\n]", screen.getvalue()) if "finished" in line]
    assert lines
    assert all("82/82" in line for line in lines)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    ("show", "count"),
    [
        (lambda: campaign_bar(done=12, total=82), "12/82"),
        (campaign_bar, r"0/\?"),
        (pool_bar, "12/82"),
    ],
)
def test_bars_show_counts_and_times_next_to_long_names(screen, monkeypatch, show, count, columns):
    on_screen(monkeypatch, screen, columns)
    show()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    *_, line = (line for line in re.split(r"[\r\n]", plain) if re.search(count, line))
    assert re.search(rf"{count} +\d:\d\d:\d\d", line)
    assert "to go" in line
    assert len(line) <= columns
