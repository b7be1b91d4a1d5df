"""Why a campaign chose what it chose: reasons come back from the store, the map has every kind."""

import os
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from encoded_pool import HELD_OUT, POOL, encode, hasty_encoders, new_campaign
from store_samples import lease_next, measurement, planned
from terminal import Terminal

from trappm.cluster.scheduler.messages import ChoiceRequest
from trappm.profiler.errors import InputError
from trappm.reports.choices import explain
from trappm.store import Home, Store


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A data folder with a campaign that has chosen two configurations."""
    home = Home(tmp_path_factory.mktemp("home"))
    with hasty_encoders(), Store.open(home.database_url) as store:
        campaign = new_campaign(store)
        free = {c.id: c for c in POOL if c.architecture != HELD_OUT}
        request = ChoiceRequest(device="cpu-2t", count=2, candidates=[*free], known=[], seed=(1,))
        choices = encode(home, store, campaign).choose(request)
        chosen = [
            replace(assignment, reason=dict(choice.reason))
            for choice, assignment in zip(
                choices, planned(free[c.configuration_id] for c in choices), strict=True
            )
        ]
        store.rounds.plan(campaign, 0, "acquired", chosen)
        yield home


def test_choices_have_reasons_and_the_next_ones_differ(home):
    with Store.open(home.database_url) as store:
        facts = explain(store, home, store.campaigns.get(None).id, device=None, count=2)
    assert facts.strategy == "ours"
    assert [c.reason["rank"] for c in facts.chosen] == [0, 1]
    assert all(c.reason["variance_reduction"] > 0 for c in facts.chosen)
    assert all(c.reason["representation"] >= 0 for c in facts.chosen)
    assert facts.wanted[0].reason["distance_to_nearest_label"] >= 0
    chosen, wanted = ({c.configuration for c in part} for part in (facts.chosen, facts.wanted))
    assert len(wanted) == 2
    assert not chosen & wanted
    kinds = [p.kind for p in facts.map]
    assert {k: kinds.count(k) for k in set(kinds)} == {
        "held out": 3, "pending": 2, "wanted": 2, "pool": 2,
    }  # fmt: skip
    assert np.isfinite([[p.x, p.y] for p in facts.map]).all()


def test_labels_change_the_next_choices(home, tmp_path):
    labelled = Home(shutil.copytree(home.path, tmp_path / "labelled"))
    with Store.open(labelled.database_url) as store:
        campaign = store.campaigns.get(None).id
        taken = {a.configuration for a in store.assignments.of_campaign(campaign)}
        free = [c for c, held_out in store.campaigns.pool(campaign) if not held_out]
        more = [c for c in free if c not in taken][:2]
        store.rounds.plan(campaign, 1, "acquired", planned(more))
        for _ in range(4):
            lease = lease_next(store, campaign)
            ms = 10.0 * lease.configuration.batch_size + 3.0 * len(lease.configuration.architecture)
            result = measurement(
                lease.configuration, step_ms=ms, attempt_key=lease.attempt_key, memory_mib=10 * ms
            )
            store.measurements.record([(result, lease.id)])
        facts = explain(store, labelled, campaign, device=None, count=2)
    assert len(facts.wanted) == 2
    # The labels are 40 to 80 ms; what the prior says without heads is 2 or 3.
    assert all(20 < choice.reason["predicted_step_time_ms"] < 150 for choice in facts.wanted)


def test_the_command_prints_draws_and_writes_json(home, monkeypatch, printed, as_json, tmp_path):
    monkeypatch.setenv("TRAPPM_HOME", str(home.path))
    shown = printed("campaign report --choices --png", tmp_path / "map.png")
    assert "next choices" in shown
    assert "X wanted" in shown
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"
    facts = as_json("campaign report --choices")
    assert [*facts] == ["campaign", "device", "strategy", "chosen", "wanted", "map"]
    assert {*facts["chosen"][0]} == {"configuration", "round", "state", "reason"}
    assert len(facts["map"]) == 9
    assert {*facts["map"][0]} == {"configuration", "x", "y", "kind"}


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


def test_impossible_questions_about_choices_are_refused(home, tmp_path):
    with Store.open(home.database_url) as store:
        id_ = store.campaigns.get(None).id
        with pytest.raises(InputError, match="it does on: cpu-2t"):
            explain(store, home, id_, device="a100", count=2)
        with pytest.raises(InputError, match="has not encoded"):
            explain(store, Home(tmp_path), id_, device=None, count=2)
