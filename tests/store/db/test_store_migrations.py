"""Stores of earlier schemas are upgraded, and revisions and models make the same tables.

`stores` has stores of earlier schemas as SQL, as the version of TraPPM that wrote them made them:
a campaign with a closed and an open round, three labels, a failure, and a lease.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect, select, text

from trappm.profiler.errors import StoreAccessError, StoreError
from trappm.store import Store, migrate
from trappm.store.engine import make_engine, writer_of
from trappm.store.migrate import run_revisions
from trappm.store.schema import METADATA, SCHEMA, VERSION_TABLE, RoundRow

STORES = Path(__file__).with_name("stores")


@pytest.fixture
def engine(empty_database_url):
    """An engine as the store has it, of an empty database."""
    engine = make_engine(empty_database_url)
    yield engine
    engine.dispose()


@pytest.fixture(params=["0018"])
def old_url(request, engine, empty_database_url):
    """The URL of a store of an earlier schema."""
    script = (STORES / f"{request.param}_{engine.dialect.name}.sql").read_text("utf-8")
    connection = engine.raw_connection()
    if engine.dialect.name == "sqlite":
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.executescript(f"BEGIN; {script} COMMIT; PRAGMA foreign_keys = ON")
    else:
        connection.execute(script)
        connection.commit()
    connection.close()
    return empty_database_url


def rows(url):
    """Every row of every table, by column."""
    engine = create_engine(url)
    with engine.connect() as connection:
        found = {}
        for table in inspect(connection).get_table_names():
            query = text(f"SELECT * FROM {table}")  # noqa: S608
            found[table] = sorted(map(dict, connection.execute(query).mappings()), key=str)
    engine.dispose()
    return found


def checks(connection):
    """Names and conditions of CHECKs, which Alembic does not compare."""
    inspector = inspect(connection)
    return {
        table: {
            check["name"]: " ".join(check["sqltext"].split())
            for check in inspector.get_check_constraints(table)
        }
        for table in inspector.get_table_names()
    }


def assert_tables_are_those_of_the_models(engine):
    options = {"include_object": lambda _, name, *__: name != VERSION_TABLE.name}
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, METADATA) == []
        by_revisions = checks(connection)
        assert sum(map(len, by_revisions.values())) > 30
    with engine.begin() as connection:
        METADATA.drop_all(connection)
        METADATA.create_all(connection)
        assert checks(connection) == by_revisions


def test_revisions_from_the_first_make_the_tables_of_the_models(engine):
    with writer_of(engine).begin() as connection:
        run_revisions(connection)
        assert connection.scalar(select(VERSION_TABLE.c.version_num)) == SCHEMA
    assert_tables_are_those_of_the_models(engine)


def test_upgraded_store_has_the_tables_of_the_models(engine, old_url):
    assert Store.upgrade(old_url) == "0018"
    assert_tables_are_those_of_the_models(engine)


def test_older_store_is_refused_with_the_command_that_upgrades_it(old_url):
    before = rows(old_url)
    for open_ in (Store.open, Store.open_to_read):
        with pytest.raises(StoreAccessError, match=r"schema 0018.*with: trappm store upgrade$"):
            open_(old_url)
    assert rows(old_url) == before


def test_upgrade_keeps_labels_and_all_other_rows_and_releases_leases(old_url):
    before = rows(old_url)
    assert Store.upgrade(old_url) == "0018"
    assert Store.upgrade(old_url) == SCHEMA
    after = rows(old_url)
    assert before["alembic_version"] == [{"version_num": "0018"}]
    before["alembic_version"] = [{"version_num": SCHEMA}]
    before["failed_hosts"] = []
    for row in before["campaigns"]:
        row.update(dict.fromkeys(["owner_id", "owner_process", "owned_since", "owner_seen_at"]))
        row["activity"] = None
    for row in before["events"]:
        row["call_id"] = None
    assert [row["state"] for row in before["assignments"]].count("leased") == 1
    for row in before["assignments"]:
        if row["state"] == "leased":
            row.update(state="open", worker=None)
        row.update(losses=0, host=None)
    for row in after["rounds"]:
        del row["planned"]
    assert after == before
    with Store.open(old_url) as store:
        assert store.check() == []
        assert [label.step_time_ms for label in store.labels.find()] == [12.5, 12.5, None]
        campaign = store.campaigns.get()
        assert (campaign.state, campaign.owner) == ("running", None)
        states = [str(each.state) for each in store.assignments.of_campaign(campaign.id)]
        assert sorted(states) == ["done"] * 4 + ["open"]
        rounds = store.rounds.all(campaign.id)
        assert [(part.number, part.report) for part in rounds] == [(0, {"error": 0.5}), (1, None)]


def test_rounds_of_an_older_store_count_their_assignments_by_device(old_url, engine):
    with writer_of(engine).begin() as connection:
        connection.execute(text("UPDATE assignments SET device_key = 'a' WHERE rank = 1"))
        connection.execute(text("INSERT INTO rounds VALUES ('02020202', 2, 'acquired', NULL)"))
    Store.upgrade(old_url)
    with engine.connect() as connection:
        planned = connection.scalars(select(RoundRow.planned).order_by(RoundRow.number)).all()
    assert planned == [{"cpu-2t": 1}, {"a": 1, "cpu-2t": 3}, {}]


def test_failed_upgrade_changes_nothing(old_url, monkeypatch):
    before = rows(old_url)
    run = command.upgrade

    def fail(*arguments):
        run(*arguments)
        raise StoreError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(command, "upgrade", fail)
        with pytest.raises(StoreError, match="power cut"):
            Store.upgrade(old_url)
    assert rows(old_url) == before
    assert Store.upgrade(old_url) == "0018"


@pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
def test_damaged_store_is_not_upgraded(old_url, engine):
    with engine.raw_connection() as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("DELETE FROM measurements WHERE id = 2")
    before = rows(old_url)
    with pytest.raises(StoreAccessError, match="row of labels refers to a row of measurements"):
        Store.upgrade(old_url)
    assert rows(old_url) == before


def test_upgrades_at_once_upgrade_once(old_url):
    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as processes:
        before = list(processes.map(Store.upgrade, [old_url] * 3))
    assert sorted(before) == sorted(["0018", SCHEMA, SCHEMA])


def test_a_store_whose_campaign_runs_is_not_upgraded(engine, old_url):
    """Its process has the earlier version, and would write what this one cannot read."""
    with engine.begin() as connection:
        now = "CURRENT_TIMESTAMP" if engine.dialect.name == "sqlite" else "now()"
        connection.execute(
            text(f"UPDATE campaigns SET owner_seen_at = {now} WHERE owner_id = 'o'")  # noqa: S608
        )
    before = rows(old_url)
    with pytest.raises(StoreAccessError, match="pause it there, with: trappm campaign pause"):
        migrate.upgrade(engine)
    assert rows(old_url) == before
