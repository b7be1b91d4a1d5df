"""What stands between the command and the campaign: a database that goes away in between."""

from __future__ import annotations

import contextlib

import pytest

from trappm.cluster import launch
from trappm.cluster.campaign.spec import load_preset
from trappm.store import CampaignState, Home, Patience, Store
from trappm.store.db import retry


@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_a_store_that_is_away_while_ray_starts_is_waited_for(tmp_path, monkeypatch, address):
    """It was there when the command began, so it is no address that is wrong."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    monkeypatch.delenv("TRAPPM_DATABASE", raising=False)
    home = Home.open()
    spec = load_preset("laptop")
    with Store.open(home.database_url) as store:
        campaign, spec = launch.start_or_continue(store, spec)
    opened, tries = Store.open, []

    def away_once(*arguments):
        tries.append(arguments)
        if len(tries) == 1:
            raise retry.StoreUnreachableError("the label store refused: it is starting up")
        return opened(*arguments)

    monkeypatch.setattr(Store, "open", away_once)
    monkeypatch.setattr(launch, "ray_runtime", lambda address: contextlib.nullcontext())
    if address is None:
        monkeypatch.setattr(launch, "_run", lambda *arguments: launch.End.FINISHED)
        launch.run_campaign(home, campaign.id, spec, address=None, watch=print)
    else:
        import ray

        def none(_name):
            raise ValueError

        monkeypatch.setattr(ray, "get_actor", none)
        launch._make_way(home, campaign.id, print)
    assert len(tries) == 2
    with opened(home.database_url, Patience()) as store:
        assert store.campaigns.state(campaign.id) is CampaignState.RUNNING
