"""A campaign that got worse says so, and does not publish transfer that lost."""

import numpy as np
import pytest
from encoded_pool import POOL, hasty_encoders, new_campaign
from store_samples import configuration, planned

from trappm.cluster.learning import campaign_learner
from trappm.cluster.learning.campaign_learner import (
    CampaignLearner,
    better_heads,
)
from trappm.cluster.scheduler.training_report import (
    Judgement,
    TrainingReport,
    TransferErrors,
    difference_of,
)
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.learner.workload import TrainingLabel
from trappm.profiler.records import METRICS
from trappm.profiler.static_profile import graph_template
from trappm.reports.campaign_facts import setbacks
from trappm.store import Home, Store


def judged(device, errors_percent, metric="step_time_ms"):
    """One judgement for each of (architecture, number, error)."""
    return [
        Judgement(
            device=device, metric=metric, measured=100.0, predicted=100.0 + error,
            architecture=name, configuration_id=f"{name}{number}",
        )
        for name, number, error in errors_percent
    ]  # fmt: skip


def report(judgements, transfer=None):
    mape = float(np.mean([abs(j.predicted - 100) for j in judgements]))
    return TrainingReport(
        devices={"cpu-2t": {"step_time_ms": {"mape": mape, "count": len(judgements)}}},
        transfer={"cpu-1t": {"memory_mib": transfer}} if transfer else {},
        evaluation=judgements,
    )


BEFORE = judged("cpu-2t", [("a", 1, 5), ("a", 2, 5), ("b", 1, 5), ("c", 1, 5)])
WORSE = judged("cpu-2t", [("a", 1, 9), ("a", 2, 9), ("b", 1, 9), ("c", 1, 10)])
NOISY = judged("cpu-2t", [("a", 1, 1), ("a", 2, 1), ("b", 1, 1), ("c", 1, 19)])


def test_differences_use_labels_judged_in_both_rounds():
    gap = difference_of(BEFORE, WORSE[:-1], "cpu-2t", "step_time_ms")
    assert (gap.points, gap.judged) == (pytest.approx(4.0), 3)
    assert gap.chance == pytest.approx(0.0)
    gap = difference_of(BEFORE, WORSE, "cpu-2t", "step_time_ms")  # means 4, 4 and 5
    assert gap.chance == pytest.approx(2 * np.std([4, 4, 5], ddof=1) / np.sqrt(3))
    alone = difference_of(BEFORE[:2], WORSE[:2], "cpu-2t", "step_time_ms")
    assert alone.chance is None
    assert difference_of(BEFORE, WORSE, "cpu-1t", "step_time_ms").judged == 0


def test_rising_errors_are_reported_with_their_chance():
    (risen,) = setbacks([(0, report(NOISY)), (1, report(BEFORE)), (2, report(WORSE))])
    assert risen.beyond_chance
    assert str(risen).startswith("cpu-2t step_time_ms: errors rose from round 1 to 2, 5 to 9.25 %")
    assert "more than chance (4 judged, chance ± 0.67)" in str(risen)
    (perhaps,) = setbacks([(1, report(BEFORE)), (2, report(NOISY))])
    assert not perhaps.beyond_chance
    assert "which chance may be" in str(perhaps)
    assert setbacks([(1, report(WORSE)), (2, report(BEFORE))]) == []
    assert setbacks([]) == []


def test_only_unsuccessful_transfer_is_reported():
    (lost,) = setbacks([(1, report(BEFORE, TransferErrors(9.0, 7.0, 0.5)))])
    assert "cpu-1t memory_mib: transfer lost to a start from scratch, 7 to 9 %" in str(lost)
    assert lost.beyond_chance
    assert setbacks([(1, report(BEFORE, TransferErrors(7.0, 9.0, 0.5)))]) == []


def label(what, device, ms, role):
    values = tuple(ms if metric == "step_time_ms" else 20.0 for metric in METRICS)
    return TrainingLabel(what.id, device, role, values, "measured")


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    names = ("test_resnet", "test_vit", "test_efficientnet", "test_convnext")
    pool = [configuration(batch, name) for name in names for batch in (1, 2, 4)]
    with hasty_encoders():
        learner = CampaignLearner(
            preset="laptop", strategy="random", source="cpu-2t", seed=1,
            cache=tmp_path_factory.mktemp("cache"),
        )  # fmt: skip
        learner.set_pool([(c, graph_template(c.architecture, 64).to_bytes()) for c in pool])
    labels = [
        label(c, device, scale * c.batch_size * (3 + at // 3), "train" if at < 9 else "evaluate")
        for device, scale in (("cpu-2t", 1.0), ("cpu-1t", 2.0))
        for at, c in enumerate(pool)
    ]
    learner.training = learner.fit(labels)
    return learner


def published(learner, folder):
    errors = {device: dict(of) for device, of in learner.training.devices.items()}
    name, notes = learner.publish(folder, {"errors": errors})
    return notes, load_snapshot(folder / name)


def test_unsuccessful_transfer_is_not_published(learner, tmp_path, monkeypatch):
    chance = learner.training.transfer["cpu-1t"]["step_time_ms"].chance
    assert chance is None  # one architecture is held out
    lost = {"step_time_ms": TransferErrors(9.0, 7.0), "memory_mib": TransferErrors(3.0, 4.0)}
    monkeypatch.setattr(campaign_learner, "cross_validated", lambda *_: lost)
    transferred, scratch = learner._heads["cpu-1t"], learner._scratch["cpu-1t"]
    notes, snapshot = published(learner, tmp_path / "lost")
    (note,) = notes
    assert note == (
        "cpu-1t: published from scratch, as transfer lost: step_time_ms (9 % against 7 % from "
        "scratch)"
    )
    heads, names = better_heads(transferred, scratch, lost)
    assert names == ["step_time_ms"]
    assert heads.heads["memory_mib"] is transferred.heads["memory_mib"]
    assert heads.heads["step_time_ms"] is scratch.heads["step_time_ms"]
    errors = snapshot.manifest.errors_by_phase("cpu-1t")[None]
    from_scratch = learner.training.transfer["cpu-1t"]["step_time_ms"].from_scratch
    assert errors["step_time_ms"].mape == pytest.approx(from_scratch)


def test_successful_transfer_is_published(learner, tmp_path, monkeypatch):
    won = {"step_time_ms": TransferErrors(6.0, 7.0)}
    monkeypatch.setattr(campaign_learner, "cross_validated", lambda *_: won)
    notes, snapshot = published(learner, tmp_path / "won")
    assert notes == ()
    transferred = learner.training.transfer["cpu-1t"]["step_time_ms"].transferred
    errors = snapshot.manifest.errors_by_phase("cpu-1t")[None]
    assert errors["step_time_ms"].mape == pytest.approx(transferred)


def test_status_and_report_show_rising_errors(tmp_path, monkeypatch, printed, as_json):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    with Store.open(Home(tmp_path).database_url) as store:
        campaign = new_campaign(store)
        for number, judgements in enumerate((BEFORE, WORSE)):
            store.rounds.plan(campaign, number, "initial", planned([POOL[number]]))
            store.rounds.close(campaign, number, report(judgements).to_json())
    for command in ("status", "report"):
        shown = printed("campaign", command, campaign)
        assert "errors that increased:" in shown
        assert "cpu-2t step_time_ms: errors rose from round 0 to 1, 5 to 9.25 %" in shown
    (setback,) = as_json("campaign status", campaign)["setbacks"]
    assert (setback["metric"], setback["judged"]) == ("step_time_ms", 4)
    assert setback["chance"] == pytest.approx(2 / 3)
