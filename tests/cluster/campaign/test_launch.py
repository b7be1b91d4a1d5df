"""Commands that launch, resume and watch campaigns while databases and actors fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
from fakes import FakeLearner, FakeWorkers, Inline, spec
from ray.exceptions import ActorDiedError, RayTaskError

from trappm.cluster import launch
from trappm.cluster.campaign import actor, process
from trappm.cluster.campaign.process import Follower, this_process
from trappm.cluster.spec import load_preset
from trappm.profiler.errors import CampaignError, InputError
from trappm.store import CampaignState, Home, Store, StoreAccess, StoreNotUpError


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A data folder with a campaign that was not begun."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    monkeypatch.delenv("TRAPPM_DATABASE", raising=False)
    return Home.open()


@pytest.fixture
def store(home):
    with Store.open(home.database_url) as store:
        yield store


@pytest.fixture
def campaign_id(store):
    campaign, _ = launch.start_or_continue(store, load_preset("laptop"))
    return campaign.id


@pytest.fixture
def away_once(monkeypatch):
    """The store cannot be opened the first time; return the list of tries."""
    opened, tries = Store.open, []

    def away_once(*arguments):
        tries.append(arguments)
        if len(tries) == 1:
            raise StoreNotUpError("the label store refused: it is starting up")
        return opened(*arguments)

    monkeypatch.setattr(Store, "open", away_once)
    return tries


def test_a_command_waits_for_a_store_that_is_not_up(home, away_once, command):
    status, _, error = command("campaign resume")
    assert (status, len(away_once)) == (2, 2)
    assert "no campaign" in error


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_campaign_process_waits_for_its_store_and_gives_its_workers_back(
    home, store, monkeypatch, away_once, is_restarted
):
    closed = []

    class Workers(FakeWorkers):
        def close(self):
            closed.append("workers")

    class Learner(Inline):
        def close(self):
            closed.append("learner")

    class Actor(actor.CampaignActor):
        def _make_profilers(self):
            return Workers()

        def _make_learner(self):
            return Learner(FakeLearner())

    context = SimpleNamespace(was_current_actor_reconstructed=is_restarted)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(actor, "CampaignMetrics", lambda _: lambda *_: None)
    record, plan = launch.start_or_continue(store, spec())
    store.owners.begin_campaign(record.id)
    made = Actor(home.path, StoreAccess.of(home), record.id, plan, may_grow=False)
    made.wait_for_end()
    assert (store.campaigns.state(record.id), len(away_once)) == (CampaignState.FINISHED, 2)
    assert closed == ["workers", "learner"]
    assert store.campaigns.get(record.id).owner is None
    events = store.campaigns.events(record.id)
    moved = any("its node is gone" in e.message["message"] for e in events)
    assert moved is is_restarted  # as its folder is not on this node


@pytest.mark.parametrize(
    ("url", "address", "is_detached", "is_soft"),
    [
        ("sqlite:///labels.db", "auto", True, False),  # its file is on this node
        ("postgresql://me@host/labels", "auto", True, True),
        ("sqlite:///labels.db", None, False, False),
    ],
)
def test_a_campaign_is_started_where_its_store_can_be_reached(
    home, store, campaign_id, monkeypatch, url, address, is_detached, is_soft
):
    class Actor:
        def options(self, **given):
            options.update(given)
            return self

        def remote(self, *arguments):
            return arguments

    options, needed = {}, []
    monkeypatch.setenv("TRAPPM_DATABASE", url)
    monkeypatch.setattr(ray, "remote", lambda _: Actor())
    monkeypatch.setattr(launch, "this_node_options", lambda soft: {"soft": soft})
    monkeypatch.setattr(launch, "require_nodes", needed.append)
    monkeypatch.setattr(launch, "_find_running_actor", lambda *_: None)
    plan = load_preset("laptop")
    *_, may_grow = launch._start_actor(store, home, campaign_id, plan, address, print)
    assert (may_grow, options["soft"]) == (is_detached, is_soft)
    assert options.get("lifetime") == ("detached" if is_detached else None)
    assert options.get("max_restarts", 0) == (launch.MAX_RESTARTS if is_detached else 0)
    assert needed == ([] if is_detached else [plan.devices.keys])
    news = [e.message["message"] for e in store.campaigns.events(campaign_id)]
    assert any("ends with its node" in line for line in news) is (is_detached and not is_soft)


class Process:
    """An actor whose process has ended, or has not."""

    def __init__(self, error=None, is_over=True):
        self.error, self.is_over = error, is_over
        self.wait_for_end = SimpleNamespace(remote=lambda: self)


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch):
    def get(process):
        if process.error is not None:
            raise process.error

    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([r for r in refs if r.is_over], []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(launch, "POLL_S", 0.01)
    monkeypatch.setattr(process, "FOLLOW_POLL_S", 0.01)


def followed(store, campaign_id, actor, **options):
    shown = []
    options = {"is_detached": False, "until_begun": False} | options
    end = launch._follow(store, Follower(store, campaign_id), actor, shown.append, **options)
    return end, shown


def claimed(store, campaign_id):
    store.owners.begin_campaign(campaign_id)
    assert store.owners.claim_campaign(campaign_id, "o", this_process())
    return store.as_owner(campaign_id, "o")


def test_the_error_names_the_reason_why_the_campaign_process_ended(store, campaign_id):
    error = ActorDiedError()
    error.error_msg = "The actor died.\n\tpid: 3\nIts node ran out of memory.\n"
    claimed(store, campaign_id)
    message = r"crashed \(Its node ran out of memory\); nothing .* trappm campaign resume \w+$"
    with pytest.raises(CampaignError, match=message):
        followed(store, campaign_id, Process(error))


def test_a_failure_before_the_campaign_began_is_shown(store, campaign_id):
    claimed(store, campaign_id)
    cause = InputError("the label store is of another version")
    with pytest.raises(InputError, match="of another version"):
        followed(store, campaign_id, Process(RayTaskError("ended", "", cause)))


def test_a_campaign_without_a_process_ends_with_the_command_to_resume_it(
    store, campaign_id, monkeypatch
):
    monkeypatch.setattr(launch, "MAX_ABSENCE_S", 0.0)
    store.owners.begin_campaign(campaign_id)
    with pytest.raises(CampaignError) as caught:
        followed(store, campaign_id, Process(is_over=False), is_detached=True)
    assert str(caught.value).endswith(f"continue with: trappm campaign resume {campaign_id}")


def test_a_detached_launch_returns_once_a_process_runs_the_campaign(store, campaign_id):
    claimed(store, campaign_id)
    end, _ = followed(store, campaign_id, Process(is_over=False), is_detached=True,
                      until_begun=True)  # fmt: skip
    assert end is launch.End.LEFT


def test_resuming_kills_an_earlier_process_that_does_not_end(store, campaign_id, monkeypatch):
    there = [Process(is_over=False)]

    def get_actor(_name):
        if not there:
            raise ValueError("no such actor")
        return there[0]

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "kill", there.remove)
    mine = claimed(store, campaign_id)
    assert (
        launch._find_running_actor(store, campaign_id, print) is there[0]
    )  # it runs: it is followed
    store.owners.stop_campaign(campaign_id, CampaignState.PAUSED)
    mine.owners.release(campaign_id, "o")
    assert launch._find_running_actor(store, campaign_id, print) is None
    assert there == []
    assert store.campaigns.state(campaign_id) is CampaignState.RUNNING


def test_ctrl_c_stops_a_campaign_and_the_command_names_the_one_to_resume_it(
    home, monkeypatch, command
):
    stages = []

    def run_campaign(home, campaign_id, spec, *, address, watch, detach):
        with Store.open(home.database_url) as store:
            claimed(store, campaign_id)

            def show(shown):
                stages.append(shown.activity.stage)
                if len(stages) == 1:
                    raise KeyboardInterrupt
                store.owners.release(campaign_id, "o")  # it has obeyed

            return launch._follow(
                store, Follower(store, campaign_id), Process(is_over=False), show,
                is_detached=False, until_begun=False,
            )  # fmt: skip

    monkeypatch.setattr(launch, "run_campaign", run_campaign)
    status, out, _ = command("campaign launch --preset laptop")
    assert (status, stages[:2]) == (130, ["starting", "stopping"])
    assert "Stopped; continue with: trappm campaign resume " in out
    with Store.open(home.database_url) as store:
        assert store.campaigns.get().state is CampaignState.PAUSED
