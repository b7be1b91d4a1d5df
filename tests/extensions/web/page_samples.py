"""A data folder with a campaign that runs, and the page on a server of this process."""

import contextlib
import os
import shutil
import socket
import threading
import time
from dataclasses import replace

from encoded_pool import HELD_OUT, POOL, new_campaign
from store_samples import DEVICE, measure_next, planned
from store_whole import canary_reading

from trappm.store import CampaignState, Home, Store

BUSY = (
    "noise: the interquartile range is 31% of a step; drift: steps of the second half were longer "
    "by 22% of the median; contention: others had its cores for 26% of the time"
)
CANARY = replace(canary_reading(POOL[0]), step_time_ms=11.0, reference_ms=10.0, relative_drift=0.1)


def chromium():
    """The system's Chromium; none is downloaded."""
    named = os.environ.get("CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("google-chrome")


def measure_some(store, campaign_id, count):
    """Record the labels of this number of assignments."""
    for number in range(count):
        ms = 10.0 + number
        measure_next(
            store, campaign_id, step_ms=ms, memory_mib=100.0 + number,
            step_samples_ms=(ms, ms + 0.5, ms - 0.25, ms + 0.125),
            started_at=f"2026-01-02T03:{number:02d}:05+00:00",
        )  # fmt: skip


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
    home = Home(folder)
    for part in (home.snapshots, home.campaigns):
        part.mkdir(parents=True)
    with Store.open(home.database_url) as store:
        campaign = new_campaign(store)
        store.owners.begin_campaign(campaign)
        judged = [c for c in POOL if c.architecture == HELD_OUT][:2]
        taught = [c for c in POOL if c.architecture != HELD_OUT]
        store.rounds.plan(campaign, 0, "evaluation", DEVICE, planned(judged, role="evaluate"))
        store.rounds.plan(campaign, 1, "initial", DEVICE, planned(taught[:4]))
        measure_some(store, campaign, 6)
        store.rounds.close(campaign, 0, {})
        store.rounds.close(campaign, 1, report(4, 22.5))
        store.rounds.plan(campaign, 2, "acquired", DEVICE, planned(taught[4:5]))
        assert store.assignments.lease_next(campaign, DEVICE, "worker-1")
        store.canaries.save(CANARY, campaign_id=campaign)
        store.campaigns.log_event(campaign, "worker", {"message": "worker-1 has joined"})
    return home, campaign


def build_busy_campaign(store):
    """A finished campaign that measured 7 of 8 configurations on a busy machine."""
    campaign = new_campaign(store, "busy")
    store.owners.begin_campaign(campaign)
    store.rounds.plan(campaign, 0, "initial", DEVICE, planned(POOL[:8]))
    measure_some(store, campaign, 7)
    for _ in range(3):
        measure_next(store, campaign, "unstable", message=BUSY)
    store.owners.end_campaign(campaign, CampaignState.FINISHED, "the last round has ended")
    return campaign


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
