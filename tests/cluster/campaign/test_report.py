"""What status and report tell of a campaign, from its store alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes import BUDGET, ONE_DEVICE, FakeLearner, FakeProfiler, FakeWorkers, campaign, ran
from test_campaign_canary import CANARY

from trappm.cluster.campaign.campaign import CampaignStopped
from trappm.cluster.campaign.training import TrainingReport
from trappm.cluster.launch import order_retry
from trappm.profiler.errors import CampaignError
from trappm.profiler.measuring.canary import CanaryPlan, read_canary
from trappm.profiler.records import Configuration, Outcome, Protocol
from trappm.reports.campaign_facts import campaign_facts, campaign_rows
from trappm.reports.campaign_report import (
    print_campaigns,
    print_report,
    print_status,
    sparkline,
)
from trappm.store.records import Activity
from trappm.store.schema import CampaignRow


class BusyWorkers(FakeWorkers):
    """Workers whose unstable runs have a reason, and other programs' share of the cores."""

    def __init__(self, message, share=None):
        super().__init__(poison="unstable")
        self._found = message, {"others_cpu_share": share}

    def _measure(self, *task):
        measurement = super()._measure(*task)
        if measurement.outcome is not Outcome.UNSTABLE:
            return measurement
        message, facts = self._found
        return replace(measurement, message=message, environment=measurement.environment | facts)


NOISE = "noise: the interquartile range is 31% of a step"


@pytest.mark.parametrize(
    ("message", "share", "reason"),
    [
        (NOISE, 0.3, "other programs used the cores. When it is quiet:"),
        (NOISE, 0.004, "their steps were not steady. Try them again with:"),
        ("3 optimizer steps were left out", 0.3, "their steps were not steady. Try them again"),
    ],
)
def test_other_programs_are_blamed_only_if_they_used_the_cores(store, message, share, reason):
    run = ran(store, BusyWorkers(message, share))
    assert f"could not be measured: {reason}" in campaign_facts(store, run.id).missing.text


def test_the_end_reports_missing_configurations_and_the_command_to_retry_them(
    store, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")
    run = ran(store, BusyWorkers("contention: others had its cores for 26% of the time"))
    facts, planned = campaign_facts(store, run.id), sum(BUDGET.values())
    again = f"trappm campaign resume {run.id} --retry-failed"
    sentence = (
        f"1 of {planned} configurations could not be measured: other programs used the cores. "
        f"When it is quiet: {again}"
    )
    assert facts.missing.text == sentence
    assert facts.to_json()["missing"]["count"] == 1
    assert facts.missing.command == again
    for show in (print_status, print_report):
        show(facts)
        shown = capsys.readouterr().out
        assert sentence in shown
        assert f"finished, 1 of {planned} configurations are missing" in shown
    assert campaign_rows(store)[0].missing == 1
    assert order_retry(store, run.id)[1] == 1
    campaign(store, FakeWorkers(), FakeLearner("snap2"), campaign_id=run.id).run()
    assert campaign_facts(store, run.id).missing is None
    print_status(campaign_facts(store, run.id))
    assert "missing" not in capsys.readouterr().out


def test_other_failures_are_counted_by_outcome(store):
    run = ran(store, FakeWorkers(poison="error"))
    text = campaign_facts(store, run.id).missing.text
    assert f"1 of {sum(BUDGET.values())} configurations have no label" in text
    assert "1 error" in text


FAILED = "the canary could not be measured: error: made to end as error"


@pytest.mark.parametrize(
    ("readings", "decision", "message"),
    [
        ([10.0, "error", 12.0, 12.0], "stop", "+20.0% off its reference"),
        ([10.0, "error", "error"], "stop", FAILED),
        ([10.0, "error", "unstable", 10.0], "unknown", ""),
        ([10.0, "error", 10.0], "ok", ""),
        (["unstable"] * 3, "drifting", ""),
    ],
)
def test_failed_readings_of_a_canary_do_not_hide_its_decision(store, readings, decision, message):
    plan = CanaryPlan(reference_readings=1)
    history = []
    what = Configuration(architecture="resnet18", batch_size=4, input_size=224)
    for number, reading in enumerate(readings):
        outcome, ms = (reading, 10.0) if isinstance(reading, str) else ("ok", reading)
        measured = FakeProfiler("cpu-2t", "host").measure(
            what, Protocol(name="quick"), f"key {number}", step_ms=ms, outcome=outcome
        )
        history.append(read_canary(measured, history, plan))
    run = campaign(store, FakeWorkers())
    for reading in history:
        store.canaries.save(reading, campaign_id=run.id)
    (series,) = campaign_facts(store, run.id).canary
    failed = sum(isinstance(reading, str) for reading in readings)
    count = f"{failed} of {len(readings)} readings of the canary gave no step time"
    assert series.decision == decision
    assert message in series.message
    assert series.message.endswith(count)


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


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([5.0], "▁"), ([1.0, None, 8.0], "▁·█"), ([None], "·"), ([0.0] * 30, "▁" * 20)],
)
def test_a_sparkline_scales_what_is_known(values, bars):
    assert sparkline(values) == bars


def test_a_campaign_is_watched_by_its_store_alone(store, capsys):
    """Its source drifted for a while."""
    workers = FakeWorkers(canary={"w-cpu-2t": [10.0, 11.2, 11.2, 10.2]})
    run = ran(store, workers, canary=CANARY)
    warnings = [line for line in workers.lines if "canary drifting" in line]
    assert len(warnings) == 2
    assert "+12.0% off its reference of 10.00 ms" in warnings[0]
    readings = store.canaries.all(device="cpu-2t")
    assert [r.decision for r in readings] == ["ok", "drifting", "drifting", "ok"]
    facts = campaign_facts(store, run.id)
    assert json.loads(json.dumps(facts.to_json())) == facts.to_json()  # as --json prints it
    source, target = sorted(facts.canary, key=lambda series: series.device, reverse=True)
    assert source.step_times_ms == [10.0, 11.2, 11.2, 10.2]
    assert source.reference_ms == 10.0
    assert source.last_drift == pytest.approx(0.02)
    assert (source.decision, target.decision) == ("ok", "ok")
    for show in (print_status, print_report):
        show(facts)
        (row,) = [line for line in capsys.readouterr().out.splitlines() if "▁██▂" in line]
        assert row.split()[0] == "cpu-2t"
        assert row.split()[-4:] == ["10", "10.2", "2", "ok"]
    (row,) = campaign_rows(store)
    assert (row.id, row.state, row.labels) == (run.id, "finished", sum(BUDGET.values()))
    assert {name: device.done for name, device in facts.devices.items()} == BUDGET
    assert facts.minutes_to_go is None  # no process says
    assert all(device.attempts_per_minute > 0 for device in facts.devices.values())
    print_status(facts)
    shown = capsys.readouterr().out
    assert f"campaign {run.id} (tiny): finished" in shown
    assert "attempts/min" in shown
    assert "workers" not in shown  # nothing works any longer
    assert "to go" not in shown


def test_status_reports_what_a_campaign_has_spent(store, tmp_path, capsys):
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
    print_status(campaign_facts(store, run.id))
    spent = f"GPU-hours and {on_cpu / 3600:,.2f} CPU-hours (money: {on_gpu:,.2f})"
    assert spent in " ".join(capsys.readouterr().out.split())
    campaign(store, FakeWorkers(devices=devices.values()), campaign_id=run.id).run()
    cost = campaign_facts(store, run.id).cost
    assert cost.money == pytest.approx(BUDGET["cpu-1t"])
    assert cost.money_to_come == 0.0


def test_a_campaign_that_has_just_begun_can_be_watched(store, tmp_path, capsys):
    run = campaign(store, FakeWorkers())
    assert campaign_facts(store, run.id).minutes_to_go is None
    run.store.owners.report(run.id, Activity(stage="measuring, round 0 of 4", eta_s=90.0))
    facts = campaign_facts(store, run.id)
    assert facts.minutes_to_go == 1.5
    assert {device.done for device in facts.devices.values()} == {0}
    print_status(facts)
    shown = capsys.readouterr().out
    assert "running" in shown
    assert "workers" in shown


def test_an_unreadable_report_is_an_error_of_one_line(refused):
    with refused("report of a round cannot be read", CampaignError):
        TrainingReport.of({"labels": []})


def test_status_reports_what_was_lost_and_why(store, capsys):
    workers = FakeWorkers(faults={1: "error", 2: "error", 5: "timeout"})
    run = ran(store, workers, **ONE_DEVICE, max_attempts=1, canary=False)
    print_status(campaign_facts(store, run.id))
    lines = capsys.readouterr().out.splitlines()
    assert "cpu-2t: 2 error, such as: made to end as error" in lines
    assert "cpu-2t: 1 timeout, such as: made to end as timeout" in lines
