"""Why a campaign chose what it chose, from the store."""

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


def test_choices_have_their_stored_reasons(home, monkeypatch, printed, as_json, refusal):
    monkeypatch.setenv("TRAPPM_HOME", str(home.path))
    assert "chosen on cpu-2t" in printed("campaign report --choices")
    facts = as_json("campaign report --choices")
    assert [choice["reason"] for choice in facts["chosen"]] == REASONS
    assert len(as_json("campaign report --choices --count 1")["chosen"]) == 1
    assert "it does on: cpu-2t" in refusal("campaign report --choices --device a100")
