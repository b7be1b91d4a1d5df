"""Shares of GPUs: none is left idle that somebody wants, and each gets what its priority says."""

from __future__ import annotations

from collections import Counter

import pytest
from campaign_crew import BUDGET, spec
from hypothesis import given
from hypothesis import strategies as st

from trappm.cluster.workers.fair_share import Claim, Claims, fair_shares
from trappm.profiler.records import Configuration
from trappm.store import PlannedAssignment

CLAIMS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.builds(Claim, st.integers(1, 10), st.integers(0, 30), st.floats(0, 1e6)),
    min_size=1,
    max_size=6,
)


@given(st.integers(0, 50), CLAIMS)
def test_no_gpu_is_given_twice_or_left_idle_and_nobody_gets_more_than_wanted(gpus, claims):
    shares = fair_shares(gpus, claims)
    assert shares.keys() == claims.keys()
    assert sum(shares.values()) == min(gpus, sum(claim.wanted for claim in claims.values()))
    assert all(0 <= shares[c] <= claims[c].wanted for c in claims)


@given(st.integers(0, 50), CLAIMS)
def test_who_gets_less_than_wanted_gets_its_part(gpus, claims):
    shares = fair_shares(gpus, claims)
    total = sum(claim.priority for claim in claims.values())
    for campaign, claim in claims.items():
        assert shares[campaign] >= min(claim.wanted, gpus * claim.priority // total)


@pytest.mark.parametrize(
    ("gpus", "priorities"), [(1, (1, 1)), (1, (3, 1)), (2, (2, 1)), (5, (1, 2, 4))]
)
def test_in_the_course_of_time_gpus_are_used_in_proportion(gpus, priorities):
    used_s = Counter()
    for _ in range(420):
        claims = {str(n): Claim(p, 100, used_s[str(n)]) for n, p in enumerate(priorities)}
        used_s.update({c: 300.0 * share for c, share in fair_shares(gpus, claims).items()})
    for n, priority in enumerate(priorities):
        assert used_s[str(n)] / used_s.total() == pytest.approx(
            priority / sum(priorities), abs=0.01
        )


def test_a_campaign_whose_budget_cannot_be_read_counts_with_what_it_has_planned(store):
    def launched(file):
        record = store.create_campaign("tiny", file, 7)
        store.begin_campaign(record.id)
        return record.id

    known = spec(priority=3).model_dump(mode="json")
    mine, foreign = launched(known), launched(known | {"rounds": "as a later version has it"})
    pool = [Configuration(architecture="resnet18", batch_size=n, input_size=64) for n in (1, 2)]
    planned = [
        PlannedAssignment(configuration=c, device="cpu-2t", role="train", rank=n)
        for n, c in enumerate(pool)
    ]
    store.set_campaign_pool(foreign, [(c, False) for c in pool])
    store.plan_round(foreign, 0, "evaluation", planned)
    claims = Claims(store, mine).of([mine, foreign])
    assert claims == {
        "cpu-2t": {mine: Claim(3, BUDGET["cpu-2t"], 0.0), foreign: Claim(1, 2, 0.0)}
    }  # fmt: skip
