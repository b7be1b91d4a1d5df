"""What status and report tell of a campaign, from its store alone."""

from __future__ import annotations

import json

import pytest
from fakes import BUDGET, FakeLearner, FakeWorkers, campaign, ran
from test_campaign_canary import CANARY

from trappm.cluster.campaign.campaign import CampaignStopped
from trappm.cluster.launch import order_retry
from trappm.reports.campaign_facts import campaign_facts, campaign_rows
from trappm.reports.campaign_report import (
    print_campaigns,
    print_report,
    print_status,
)
from trappm.store.schema import CampaignRow


def test_the_end_reports_missing_configurations_and_the_command_to_retry_them(
    store, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")
    run = ran(store, FakeWorkers(poison="unstable"))
    facts, planned = campaign_facts(store, run.id), sum(BUDGET.values())
    again = f"trappm campaign resume {run.id} --retry-failed"
    assert facts.missing.text.startswith(f"1 of {planned} configurations could not be measured: ")
    assert facts.to_json()["missing"]["count"] == 1
    assert facts.missing.command == again
    for show in (print_status, print_report):
        show(facts)
        assert facts.missing.text in capsys.readouterr().out
    assert campaign_rows(store)[0].missing == 1
    assert order_retry(store, run.id)[1] == 1
    campaign(store, FakeWorkers(), FakeLearner("snap2"), campaign_id=run.id).run()
    assert campaign_facts(store, run.id).missing is None


def test_an_interrupted_campaign_is_shown_with_the_command_to_resume_it(store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = campaign(store, FakeWorkers())  # begun, with this process for its owner
    assert campaign_rows(store)[0].state == "running"
    with store.database.writing() as session:
        row = session.get(CampaignRow, run.id)
        row.owner_seen_at = "2026-01-01T00:00:00+00:00"
    rows = campaign_rows(store)
    assert (rows[0].state, campaign_facts(store, run.id).state) == ("interrupted",) * 2
    for show in (
        lambda: print_campaigns(rows),
        lambda: print_status(campaign_facts(store, run.id)),
    ):
        show()
        shown = " ".join(capsys.readouterr().out.split())
        assert f"interrupted; continue with: trappm campaign resume {run.id}" in shown


def test_a_campaign_is_watched_by_its_store_alone(store):
    """Its source drifted for a while."""
    workers = FakeWorkers(canary={"w-cpu-2t": [10.0, 11.2, 11.2, 10.2]})
    run = ran(store, workers, canary=CANARY)
    facts = campaign_facts(store, run.id)
    assert json.loads(json.dumps(facts.to_json())) == facts.to_json()  # as --json prints it
    source, target = sorted(facts.canary, key=lambda series: series.device, reverse=True)
    assert source.step_times_ms == [10.0, 11.2, 11.2, 10.2]
    assert source.reference_ms == 10.0
    assert source.last_drift == pytest.approx(0.02)
    assert (source.decision, target.decision) == ("ok", "ok")
    (row,) = campaign_rows(store)
    assert (row.id, row.state, row.labels) == (run.id, "finished", sum(BUDGET.values()))
    assert {name: device.done for name, device in facts.devices.items()} == BUDGET
    assert facts.minutes_to_go is None  # no process says
    assert all(device.attempts_per_minute > 0 for device in facts.devices.values())


def test_status_reports_what_a_campaign_has_spent(store):
    devices = {"source": "cpu-2t", "target": "a100"}
    workers = FakeWorkers(stop_after=7, devices=devices.values())
    run = campaign(store, workers, devices=devices, stop={"price_per_gpu_hour": 3600.0})
    with pytest.raises(CampaignStopped):
        run.run()
    cost = campaign_facts(store, run.id).cost
    counts = store.campaigns.outcome_counts(run.id)
    on_cpu, on_gpu = (sum(counts[device].values()) for device in devices.values())
    # Each attempt is made up to take a second.
    assert cost.money == pytest.approx(on_gpu)
    assert cost.money_to_come == pytest.approx(BUDGET["cpu-1t"] - on_gpu)
    assert cost.gpu_hours == pytest.approx(on_gpu / 3600)
    assert cost.cpu_hours == pytest.approx(on_cpu / 3600)
    assert cost.cpu_hours_to_come == pytest.approx((BUDGET["cpu-2t"] - on_cpu) / 3600)
