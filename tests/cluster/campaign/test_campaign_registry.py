"""A campaign whose file names a registry: encoder and snapshot follow it to another host."""

import pytest
from encoded_pool import hasty_encoders
from fakes import FakeWorkers, campaign

from trappm.cluster.campaign.learner import CampaignLearner
from trappm.learner.paper import encoder
from trappm.learner.snapshots.registry import Registry
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.profiler.errors import SnapshotError, TrappmError
from trappm.store import CampaignState


@pytest.fixture
def registry(tmp_path):
    """The location of an empty registry."""
    return str(tmp_path / "shared")


@pytest.fixture(autouse=True)
def encoders_that_hardly_learn():
    with hasty_encoders():
        yield


class Learner(CampaignLearner):
    """A learner that may fail before it has moved the alias."""

    error = None

    def promote(self, registry, snapshot_id):
        if self.error is not None:
            raise self.error
        return super().promote(registry, snapshot_id)


def on_host(store, registry, folder, campaign_id=None):
    """The campaign on a host with this folder."""
    learner = Learner(
        preset="laptop", strategy="random", source="cpu-2t", seed=7, cache=registry
    )  # fmt: skip
    run = campaign(store, FakeWorkers(), learner, campaign_id, registry=registry, strategy="random")
    run.snapshots = folder
    return run


@pytest.mark.parametrize("error", [SnapshotError("the registry is away"), OSError("is away")])
def test_a_campaign_that_moves_to_another_host_publishes_once_into_its_registry(
    store, registry, tmp_path, monkeypatch, error
):
    """The first one has pushed its snapshot, and cannot make it the latest."""
    first = on_host(store, registry, tmp_path / "first")
    monkeypatch.setattr(Learner, "error", error)
    with pytest.raises(TrappmError, match="is away"):
        first.run()
    assert store.campaigns.state(first.id) is CampaignState.FAILED
    (snapshot_id,) = Registry(registry).ids()
    assert Registry(registry).aliases() == {}

    def again(*_):
        raise AssertionError("the encoder is trained again")

    monkeypatch.setattr(Learner, "error", None)
    monkeypatch.setattr(encoder, "train_encoder", again)
    second = on_host(store, registry, tmp_path / "second", first.id)
    assert second.run() == snapshot_id
    assert Registry(registry).ids() == [snapshot_id]
    assert [x.snapshot for x in Registry(registry).history("latest")] == [snapshot_id]
    assert not (tmp_path / "second" / "aliases").exists()
    Registry(registry).pull(snapshot_id, tmp_path / "user")
    assert load_snapshot(tmp_path / "user").manifest.campaign == first.id
    assert second.profilers.lines[-1] == f"snapshot {snapshot_id} in {registry}"


def test_the_parent_is_the_latest_of_the_registry(store, registry, tmp_path):
    before = on_host(store, registry, tmp_path / "here").run()
    after = on_host(store, registry, tmp_path / "there").run()
    assert Registry(registry).manifest(after).parent == before


def test_a_damaged_encoder_is_trained_again_and_replaced(store, tmp_path):
    shared = tmp_path / "shared"
    on_host(store, str(shared), tmp_path / "here").run()
    (path,) = shared.glob("encoder-*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    on_host(store, str(shared), tmp_path / "there").run()
    assert path.read_bytes() == whole


def test_a_registry_that_cannot_be_written_fails_the_campaign_and_resume_publishes(
    store, tmp_path, monkeypatch
):
    shared = str(tmp_path / "shared")
    run = on_host(store, shared, tmp_path / "here")

    def away(self, folder):
        raise SnapshotError(f"the registry {self.location} cannot be used: away")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "push", away)
        with pytest.raises(SnapshotError, match="cannot be used: away"):
            run.run()
    assert store.campaigns.state(run.id) is CampaignState.FAILED
    snapshot_id = on_host(store, shared, tmp_path / "here", run.id).run()
    assert Registry(shared).aliases() == {"latest": snapshot_id}
