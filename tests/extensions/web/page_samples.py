"""A data folder with a campaign that runs, and the page on a server of this process."""

import contextlib
import itertools
import os
import shutil
import socket
import threading
import time
from dataclasses import replace

from trappm.cluster.learning.campaign_learner import CampaignLearner
from trappm.cluster.spec import parse_spec
from trappm.profiler.measuring.canary import CanaryDecision, CanaryReading
from trappm.profiler.records import Configuration, Measurement, Outcome, Protocol, StepSummary
from trappm.store import Assignment, CampaignState, Home, Store

NAMES = ("test_resnet", "test_vit", "test_efficientnet")
HELD_OUT = "test_vit"
SPEC = """
name: seen
devices: {source: cpu-2t}
evaluation: {source: 2}
initial: {source: 4}
rounds: {count: 2, source: 1}
stop: {target_mape: {step_time_ms: 10}, price_per_gpu_hour: 2.5}
pool:
  groups:
    - {architectures: [test_resnet, test_vit, test_efficientnet], batch_sizes: [1, 2, 4],
       input_sizes: [64]}
"""
BUSY = (
    "noise: the interquartile range is 31% of a step; drift: steps of the second half were longer "
    "by 22% of the median; contention: others had its cores for 26% of the time"
)
ENVIRONMENT = {"device": "cpu-2t", "torch": "2.13.0", "host": "here"}


def chromium():
    """The system's Chromium; none is downloaded."""
    named = os.environ.get("CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("google-chrome")


def measured(what, number, attempt_key):
    ms = 10.0 + number
    return Measurement(
        configuration=what, device="cpu-2t", outcome=Outcome.OK, protocol=Protocol(name="quick"),
        started_at=f"2026-01-02T03:{number:02d}:05+00:00", duration_s=3.0,
        step_samples_ms=(ms, ms + 0.5, ms - 0.25, ms + 0.125),
        step=StepSummary(median_ms=ms, mean_ms=ms + 0.1, iqr_ms=0.5, p95_ms=ms + 1),
        memory_mib=100.0 + number, missing={"power_w": "no meter"}, environment=ENVIRONMENT,
        attempt_key=attempt_key,
    )  # fmt: skip


def measure_next(store, campaign_id, number):
    (waiting, *_) = store.assignments.of_campaign(campaign_id, state="open")
    (lease,) = store.measurements.record_and_lease([], [(waiting.id, "worker-1")])
    store.measurements.record(
        measured(lease.configuration, number, lease.attempt_key), assignment_id=lease.id
    )


def report(labels, mape):
    errors = {"count": 2, "mape": mape, "median_ape": mape, "rmse": 1.0, "coverage": 100.0,
              "within_10_percent": 50.0, "kendall_tau": 1.0}  # fmt: skip
    point = {"device": "cpu-2t", "architecture": HELD_OUT, "metric": "step_time_ms"}
    return {
        "labels": {"cpu-2t": labels},
        "devices": {"cpu-2t": {"step_time_ms": errors}},
        "transfer": {},
        "evaluation": [
            {**point, "configuration_id": str(i), "measured": 10.0 * i, "predicted": 9.0 * i,
             "low": 5.0 * i, "high": 20.0 * i}
            for i in (1, 2)
        ],
        "spent": {"labels": labels + 2, "gpu_seconds": 3.0 * labels,
                  "at": f"2026-01-02T03:1{labels}:00+00:00"},
    }  # fmt: skip


def build_home(folder):
    """Round 0 judged, round 1 learned from, one assignment of round 2 with a worker."""
    from trappm.profiler.static_profile import graph_template

    home = Home(folder)
    for part in (home.snapshots, home.campaigns):
        part.mkdir(parents=True)
    spec = parse_spec(SPEC, origin="the test")
    templates = {name: graph_template(name, 64).to_bytes() for name in NAMES}
    pool = [
        Configuration(architecture=name, batch_size=batch, input_size=64)
        for name in NAMES
        for batch in (1, 2, 4)
    ]
    with Store.open(home.database_url) as store:
        for name, template in templates.items():
            store.workloads.save_graph(name, 64, template, None)
        campaign = store.campaigns.create(spec.name, spec.model_dump(mode="json"), spec.seed).id
        store.campaigns.set_pool(campaign, [(c, c.architecture == HELD_OUT) for c in pool])
        learner = CampaignLearner(
            preset=spec.learner, strategy=spec.strategy, source="cpu-2t", seed=spec.seed,
            cache=home.campaigns / campaign,
        )  # fmt: skip
        ordered = [(c, templates[c.architecture]) for c, _ in store.campaigns.pool(campaign)]
        learner.set_pool(ordered)
        judged = [c for c in pool if c.architecture == HELD_OUT][:2]
        taught = [c for c in pool if c.architecture != HELD_OUT]
        store.rounds.plan(campaign, 0, "evaluation", planned(judged, "evaluate"))
        store.rounds.plan(campaign, 1, "initial", planned(taught[:4], "train"))
        for number in range(6):
            measure_next(store, campaign, number)
        store.rounds.close(campaign, 0, {})
        store.rounds.close(campaign, 1, report(4, 22.5))
        store.rounds.plan(campaign, 2, "acquired", planned(taught[4:5], "train"))
        (waiting,) = store.assignments.of_campaign(campaign, state="open")
        store.measurements.record_and_lease([], [(waiting.id, "worker-1")])
        store.canaries.save(_canary(pool[0]), campaign_id=campaign)
        store.campaigns.log_event(campaign, "worker", {"message": "worker-1 has joined"})
        store.owners.begin_campaign(campaign)
    return home, campaign


def record_unstable(store, campaign_id, message):
    (waiting, *_) = store.assignments.of_campaign(campaign_id, state="open")
    (lease,) = store.measurements.record_and_lease([], [(waiting.id, "worker-1")])
    unstable = replace(
        measured(lease.configuration, 0, lease.attempt_key),
        outcome=Outcome.UNSTABLE, failed_in="measure", message=message,
    )  # fmt: skip
    store.measurements.record(unstable, assignment_id=lease.id)


def build_busy_campaign(store):
    """A finished campaign that measured 7 of 8 configurations on a busy machine."""
    spec = parse_spec(SPEC, origin="the test")
    pool = [
        Configuration(architecture=name, batch_size=batch, input_size=64)
        for name, batch in itertools.product(NAMES, (1, 2, 4))
    ]
    campaign = store.campaigns.create("busy", spec.model_dump(mode="json"), spec.seed).id
    store.campaigns.set_pool(campaign, [(c, c.architecture == HELD_OUT) for c in pool])
    store.owners.begin_campaign(campaign)
    store.rounds.plan(campaign, 0, "initial", planned(pool[:8], "train"))
    for number in range(7):
        measure_next(store, campaign, number)
    for _ in range(3):
        record_unstable(store, campaign, BUSY)
    for number, ms in enumerate((11.0, None, None, None)):
        reading = replace(
            _canary(pool[0]), attempt_key=f"busy-canary-{number}", step_time_ms=ms,
            taken_at=f"2026-01-02T03:0{number}:00+00:00",
            outcome=Outcome.OK if ms else Outcome.UNSTABLE,
            relative_drift=0.1 if ms else None,
        )  # fmt: skip
        store.canaries.save(reading, campaign_id=campaign)
    store.owners.end_campaign(campaign, CampaignState.FINISHED, "the last round has ended")
    return campaign


def planned(configurations, role):
    return [
        Assignment(
            configuration=choice, device="cpu-2t", role=role, rank=rank,
            reason={"strategy": "ours", "uncertainty": 0.25 + rank},
        )
        for rank, choice in enumerate(configurations)
    ]  # fmt: skip


def _canary(what):
    return CanaryReading(
        attempt_key="canary-1", taken_at="2026-01-02T03:00:00+00:00", host="here", device="cpu-2t",
        stack_fingerprint="0123456789abcdef", configuration=what, protocol="quick",
        outcome=Outcome.OK, step_time_ms=11.0, memory_mib=100.0, power_w=None, reference_ms=10.0,
        relative_drift=0.1, decision=CanaryDecision.OK,
    )  # fmt: skip


@contextlib.contextmanager
def served(**settings):
    """The application at a free port of this process; its address."""
    import uvicorn

    from trappm.extensions.web.app import create_app
    from trappm.extensions.web.gate import ServingSettings

    place = socket.create_server(("127.0.0.1", 0))
    app = create_app(replace(ServingSettings(hosts=("127.0.0.1",)), **settings))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([place],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{place.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        place.close()
