"""The time to go of a campaign, from its standing alone."""

import pytest

from trappm.cluster.campaign.rules import seconds_to_go
from trappm.cluster.spec import CampaignSpec
from trappm.store import CampaignState
from trappm.store.records import Pending, Purpose, RoundRecord, Standing

SPEC = CampaignSpec.model_validate({
    "name": "timed", "devices": {"source": "cpu-1t"}, "canary": None,
    "evaluation": {"source": 10}, "initial": {"source": 10}, "rounds": {"count": 1, "source": 20},
    "pool": {"groups": [
        {"architectures": ["resnet18"], "batch_sizes": list(range(1, 60)), "input_sizes": [64]}
    ]},
})  # fmt: skip


def standing(*, waiting, attempts, seconds, adopted=0):
    """The standing after the evaluation of ten, of which some have not ended."""
    purpose = next(iter(Purpose))
    return Standing(
        state=CampaignState.RUNNING,
        rounds=[RoundRecord(
            campaign_id="c", number=0, purpose=purpose, planned={"cpu-1t": 10}, report=None
        )],
        pending=[Pending("cpu-1t", 0, waiting, 0)],
        attempts={"cpu-1t": attempts}, seconds={"cpu-1t": seconds},
        measured={"cpu-1t": 10 - waiting - adopted}, labels=10 - waiting,
        has_pool=True, is_enough=False,
    )  # fmt: skip


def to_go_s(known):
    return seconds_to_go(SPEC, known, 0.0, {"cpu-1t": 1})


def test_time_to_go_is_that_of_what_has_not_ended():
    assert to_go_s(standing(waiting=10, attempts=0, seconds=0.0)) is None
    # 30 are to be planned and 5 wait, at 4 s each.
    assert to_go_s(standing(waiting=5, attempts=5, seconds=20.0)) == pytest.approx(35 * 4)


def test_labels_of_earlier_campaigns_do_not_shorten_the_time_to_go():
    adopting = standing(waiting=5, attempts=2, seconds=20.0, adopted=3)
    assert to_go_s(adopting) == pytest.approx(35 * 10)


def test_time_to_go_has_the_attempts_that_fail():
    failing = standing(waiting=5, attempts=15, seconds=60.0)
    assert to_go_s(failing) == pytest.approx(35 * 12)
    assert to_go_s(standing(waiting=10, attempts=3, seconds=12.0)) == pytest.approx(40 * 4)
