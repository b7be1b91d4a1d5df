"""Errors of a campaign's learner and of another one on the same labels."""

from dataclasses import replace

import pytest
import yaml
from encoded_pool import hasty_encoders
from fakes import SPEC, FakeWorkers, campaign

from trappm.cluster import launch
from trappm.cluster.campaign.learner import CampaignLearner
from trappm.learner.paper.presets import PAPER_SMALL, PRESETS
from trappm.store import Home, Store

pytest.importorskip("matplotlib")

LABELS = {
    "evaluation": {"source": 3, "target": 2, "architecture_share": 0.3},
    "initial": {"source": 5, "target": 4},
    "rounds": {"count": 1, "source": 2, "target": 1},
}


class UnpublishedLearner(CampaignLearner):
    """A real learner whose snapshots go nowhere."""

    def publish(self, *_):
        return "snapshot", ()

    def promote(self, *_):
        return None


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A data folder; `twin` is the papers' learner under another name."""
    with hasty_encoders() as patch:
        encoder = PRESETS["laptop"].encoder
        small = replace(PAPER_SMALL, encoder=encoder, head=replace(PAPER_SMALL.head, steps=2))
        patch.setitem(PRESETS, "paper-small", small)
        patch.setitem(PRESETS, "twin", replace(small, name="twin"))
        home = Home(tmp_path_factory.mktemp("home"))
        patch.setenv("TRAPPM_HOME", str(home.path))
        patch.setenv("COLUMNS", "80")
        yield home


@pytest.fixture(scope="module")
def campaign_id(home):
    """A finished campaign, which measured one label of the first training after it."""

    def run_campaign(home, campaign_id, spec, **_):
        learner = UnpublishedLearner(
            preset=spec.learner, strategy="ours", source="cpu-2t", seed=spec.seed,
            cache=home.campaigns / campaign_id,
        )  # fmt: skip
        with Store.open(home.database_url) as store:
            campaign(store, FakeWorkers(faults={6: "unstable"}), learner, campaign_id).run()
        return launch.End.FINISHED

    from trappm.cli import run

    file = home.path / "tiny.yaml"
    file.write_text(yaml.safe_dump({**SPEC, **LABELS, "learner": "paper-small"}))
    with pytest.MonkeyPatch.context() as patch, (home.path / "out").open("w") as out:
        patch.setattr(launch, "run_campaign", run_campaign)
        patch.setattr("sys.stdout", out)
        assert run(["campaign", "launch", str(file)]) == 0
    with Store.open(home.database_url) as store:
        return store.campaigns.get(None).id


def test_a_campaign_of_the_papers_learner_ends_with_the_default_learner_next_to_it(
    home, campaign_id
):
    shown = (home.path / "out").read_text()
    plot = home.campaigns / campaign_id / "errors_by_labels.png"
    assert "step time on cpu-2t: error by number of labels" in shown
    assert shown.rstrip().endswith(f"Plot: {plot}")
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_learner_is_compared_on_the_labels_that_each_round_had(campaign_id, as_json):
    """A twin of the campaign's learner has the errors that the campaign reported."""
    made = as_json("campaign report --compare twin")
    assert made["learners"] == ["paper-small", "twin"]
    assert made["seeds"] == [7]
    assert not made["remarks"]
    source = [p for p in made["points"] if (p["device"], p["metric"]) == ("cpu-2t", "memory_mib")]
    assert [p["round"] for p in source] == [1, 2]
    assert [p["labels"] for p in source] == [4, 7]  # of 5 planned, one was late
    for point in made["points"]:
        assert point["errors"]["twin"] == pytest.approx(point["errors"]["paper-small"])
        assert (point["device"] == "cpu-1t") == bool(point["from_scratch"])
        scratch = point["from_scratch"]
        assert scratch.get("twin") == pytest.approx(scratch.get("paper-small"))
