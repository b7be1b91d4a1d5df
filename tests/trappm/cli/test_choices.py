"""Why a campaign chose what it chose, from the store; tables on narrow screens."""

import re
from dataclasses import replace

import pytest
from encoded_pool import HELD_OUT, POOL, new_campaign
from store_samples import DEVICE, planned

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
    assert "chosen on cpu-2t" in printed("campaign report --choices")
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
DECORATION = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\u2800-\u28ff]|on a wider screen: .*")


def test_tables_fit_the_screen_without_cutting_words(home, monkeypatch, printed):
    """A narrow screen whose words differ from those of a wide one has cut a word."""
    monkeypatch.setenv("TRAPPM_HOME", str(home.path))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    words = []
    for columns in ("250", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        plain = DECORATION.sub("", "".join(map(printed, COMMANDS)))
        rules = [len(line) for line in plain.splitlines() if set(line) == {"─"}]
        assert rules
        assert max(rules) <= int(columns)
        words.append(set(re.split(r"[\s│─;]+", plain)))
    assert words[1] - words[0] == set()
