"""Shares of GPUs: none is left idle that somebody wants, and each gets what its priority says."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.shares import Claim, fair_shares

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
