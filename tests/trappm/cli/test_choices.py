"""Why a campaign chose what it chose, from the store; tables on narrow screens."""

import os
import re
import sys
from dataclasses import replace

import pytest
from encoded_pool import HELD_OUT, POOL, new_campaign
from store_samples import DEVICE, planned
from terminal import Terminal

from trappm.store import Home, Store

REASONS = [
    {"rank": 0, "rank_under_random": 3, "variance_reduction": 1.5, "representation": 0.25},
    {"rank": 1, "rank_under_random": 5, "variance_reduction": 0.5, "representation": 0.125},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A data folder with a campaign that has chosen two configurations."""
    home = Home(tmp_path_factory.mktemp("home"))
    with Store.open(home.database_url) as store:
        campaign = new_campaign(store)
        free = [c for c in POOL if c.architecture != HELD_OUT]
        chosen = [replace(a, reason=r) for a, r in zip(planned(free[:2]), REASONS, strict=True)]
        store.rounds.plan(campaign, 0, "acquired", DEVICE, chosen)
    return home


def test_choices_are_printed_with_their_stored_reasons(home, monkeypatch, printed, as_json):
    monkeypatch.setenv("TRAPPM_HOME", str(home.path))
    shown = printed("campaign report --choices")
    assert "chosen on cpu-2t" in shown
    assert "stands for" in shown
    facts = as_json("campaign report --choices")
    assert [*facts] == ["campaign", "device", "chosen"]
    assert {*facts["chosen"][0]} == {"configuration", "round", "state", "reason"}
    assert [choice["reason"] for choice in facts["chosen"]] == REASONS
    assert len(as_json("campaign report --choices --count 1")["chosen"]) == 1


def test_choices_of_another_device_are_refused(home, monkeypatch, refusal):
    monkeypatch.setenv("TRAPPM_HOME", str(home.path))
    assert "it does on: cpu-2t" in refusal("campaign report --choices --device a100")
    assert "--device needs --choices" in refusal("campaign report --device cpu-2t")


COMMANDS = (
    "campaign report --choices",
    "compare test_resnet mobilenetv4_conv_small_035 --input-size 64 --batch-size 64",
    "predict test_resnet --input-size 64 --batch-size 4096 --epochs 90 --samples 1281167",
    "snapshot show default",
)
WIDE = "250"
"""Columns on which nothing needs to be broken."""
TABLES = f"""
import os
from trappm.cli import run
for os.environ["COLUMNS"] in ({WIDE!r}, ""):  # then those of the terminal
    print("columns:", os.environ["COLUMNS"])
    for command in {COMMANDS!r}:
        print("$", command, flush=True)
        run(command.split())
"""
EXPLAINED = re.compile(r"on a wider screen: .*")


def words_and_widths(plain):
    """Words of the commands' output, and the widths of the lines of tables."""
    assert plain.count("$ ") == len(COMMANDS)
    rules = [len(line) for line in plain.split("\n") if set(line) == {"─"}]
    return set(re.split(r"[\s│─;]+", EXPLAINED.sub("", plain))), rules


def test_tables_fit_the_screen_without_cutting_words(home):
    """A narrow screen whose words differ from those of a wide one has cut a word."""
    terminal = Terminal(
        [sys.executable, "-c", TABLES], env={**os.environ, "TRAPPM_HOME": str(home.path)}
    )
    assert terminal.wait(280) == 0, terminal.raw
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\u2800-\u28ff]", "", terminal.raw).replace("\r", "")
    wide, narrow = plain.removeprefix(f"columns: {WIDE}\n").split("columns: \n")
    whole, _ = words_and_widths(wide)
    words, rules = words_and_widths(narrow)
    assert max(rules) <= 80
    assert words - whole == set()
