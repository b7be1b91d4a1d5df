"""A campaign does not publish transfer that lost to a start from scratch."""

import pytest
from encoded_pool import hasty_encoders
from store_samples import configuration

from trappm.cluster.campaign import learner as campaign_learner
from trappm.cluster.campaign.learner import (
    CampaignLearner,
    better_heads,
)
from trappm.cluster.campaign.training import TransferErrors
from trappm.learner.interface import TrainingLabel
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.profiler.records import METRICS
from trappm.profiler.trace import trace


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
        graphs = {name: trace(name, 64).graph.to_bytes() for name in names}
        learner.set_pool([(c, graphs[c.architecture]) for c in pool])
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
    lost = {"step_time_ms": TransferErrors(9.0, 7.0), "memory_mib": TransferErrors(3.0, 4.0)}
    monkeypatch.setattr(campaign_learner, "cross_validate", lambda *_: lost)
    transferred, scratch = learner._heads["cpu-1t"], learner._scratch_heads["cpu-1t"]
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
    errors = snapshot.manifest.errors["cpu-1t"]["train"]
    from_scratch = learner.training.transfer["cpu-1t"]["step_time_ms"].from_scratch
    assert errors["step_time_ms"].mape == pytest.approx(from_scratch)


def test_errors_of_folds_count_by_their_labels():
    """Three folds, of five, seven and three labels; the error of each is that number."""
    groups = [name for at, name in enumerate("abcde", 1) for _ in range(at)]
    labels = [label(configuration(at + 1), "cpu-1t", 1.0, "train") for at in range(len(groups))]

    def judge(heads, held_out):
        error = float(len(held_out)) * (1 if heads == "transferred" else 2)
        return {"step_time_ms": {"mape": error, "count": len(held_out)}}

    errors = campaign_learner.cross_validate(
        labels, groups, "source", lambda rest, init, _: "transferred" if init else "scratch",
        judge, lambda done, total: None,
    )  # fmt: skip
    mean = (5 * 5 + 7 * 7 + 3 * 3) / 15
    assert errors == {"step_time_ms": TransferErrors(mean, 2 * mean)}
