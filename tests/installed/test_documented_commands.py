"""Every `trappm` command of the README and the guides runs, and answers in the shape
that the page shows: the same columns in tables, the same beginnings of sentences."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from encoded_pool import hasty_encoders
from fakes import FakeWorkers, campaign
from onnx_export import export_onnx

from trappm import cli
from trappm.cluster.campaign.learner import CampaignLearner
from trappm.cluster.trace_tasks import trace_of
from trappm.store import Home, Store

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")) if "$ trappm" in page.read_text()
)
LONG = {ROOT / "docs/advice.md", ROOT / "docs/transformers.md"}
"""Pages whose commands compute for more than ten seconds."""
ELSEWHERE = {
    "calibrate": "tests/extensions/calibration runs the page's steps",
    "campaign launch": "test_main_job and test_installed_wheel launch campaigns",
    "serve": "a server, which tests/extensions/web asks",
    "measure": "needs the page's device and a quiet machine; tests/profiler measures",
    "pool build": "makes the graphs of 800 architectures; test_cli_pool builds small ones",
}
"""Commands that are not run here, by their beginning, and why."""
PLACES = {"/shared/team": "team", "s3://bucket/snapshots": "team"}
"""What pages share, and where it lies here."""
RESNET18 = {"attempt_key": "documented", "architecture": "resnet18", "batch_size": 8,
            "input_size": 64, "device": "cpu-2t"}  # fmt: skip
"""Of a label that pages look up."""
RULE = re.compile(r"^─+$")
ANSWERS = ("predict", "compare", "advise", "check", "scale", "generate", "roofline")
"""Commands that predict; what the pages show of their answers is compared to the digit."""


@dataclass(frozen=True)
class Command:
    """A command of a page, and what the page shows below it."""

    words: tuple[str, ...]
    output: tuple[str, ...]

    @property
    def left_out(self):
        return any(" ".join(self.words).startswith(start) for start in ELSEWHERE)

    @property
    def has_fixed_answer(self):
        """Return whether the answer is a prediction by the shipped snapshot."""
        command, *words = self.words
        return command in ANSWERS and not any(word.startswith("cpu-") for word in words)

    def missing_from(self, out):
        """Return the first part of the shown output that `out` lacks; "..." omits text."""
        rest = words_of(out)
        parts = words_of("\n".join(self.output)).split("...")
        for part in filter(None, map(str.strip, parts)):
            _, found, rest = rest.partition(part)
            if not found:
                return part
        return None


def words_of(out):
    """Return a text in one line, without the rules of tables."""
    return " ".join(out.replace("─", "").split())


def commands(page):
    result = []
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        words = None
        output = []
        for line in [*re.sub(r"\\\n +", "", block).splitlines(), "$ end"]:
            if not line.startswith("$ "):
                output.append(line)
                continue
            if words is not None:
                result.append(Command(words, tuple(output)))
            typed = shlex.split(line[2:], comments=True)
            words = tuple(typed[1:]) if typed[:1] == ["trappm"] else None
            output = []
    return result


CAMPAIGN = {
    "name": "laptop", "canary": False,
    "evaluation": {"source": 8, "target": 4, "architecture_share": 0.2},
    "initial": {"source": 16, "target": 8}, "rounds": {"count": 0, "source": 0},
    "pool": {"groups": [{
        "architectures": ["test_convnext", "test_efficientnet", "test_resnet", "test_vit",
                          "test_vit2"],
        "batch_sizes": list(range(1, 25)), "input_sizes": [64],
    }]},
}  # fmt: skip


def run_campaign(home):
    """Run a campaign to heads and a snapshot, whose measurements alone are made up."""
    with hasty_encoders(), Store.open(home.database_url) as store:
        learner = CampaignLearner(
            preset="laptop", strategy="ours", source="cpu-2t", seed=7, cache=home.campaigns
        )
        run = campaign(store, FakeWorkers(trace_of=trace_of), learner, **CAMPAIGN)
        run.snapshots = home.snapshots
        run.run()
        assert store.campaigns.state(run.id) == "finished"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder in which a campaign has ended, a file to ask about, and a place to share."""
    folder = tmp_path_factory.mktemp("documented")
    home = folder / "home"
    export_onnx("test_resnet", 64, folder / "model.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAPPM_HOME", str(home))
        run_campaign(Home.open())
        results = folder / "results.jsonl"
        assert cli.run(["labels", "export", str(results)]) == 0
        label = json.loads(results.read_text().splitlines()[0]) | RESNET18
        results.write_text(json.dumps(label) + "\n")
        assert cli.run(["labels", "import", str(results)]) == 0
        yield folder


@pytest.fixture
def trappm(folder, capsys, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(folder / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(folder)

    def run(words):
        capsys.readouterr()
        there = [PLACES.get(word, word) for word in words]
        status = cli.run(there)
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_documented_commands_print_what_the_page_shows(page, trappm):
    for command in commands(page):
        if command.left_out:
            continue
        status, out, err = trappm(command.words)
        assert status == 0, (command.words, err)
        shown = out.splitlines()
        for header in headers(command.output):
            assert header in headers(shown), (command.words, header, headers(shown))
        if command.has_fixed_answer:
            assert command.missing_from(out) is None, (command.words, out)


def headers(lines):
    """Names of the columns of each table: what stands in the line above a rule."""
    return [
        re.sub(r"\s+", " ", above).strip()
        for above, below in itertools.pairwise(lines)
        if RULE.match(below)
    ]
