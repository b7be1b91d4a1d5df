"""Queries in SQL: what can be read is read, and nothing is written."""

from itertools import cycle

import pytest
from sqlalchemy import make_url
from store_samples import DEVICE, configuration, contents, measurement

from trappm.profiler.errors import InputError
from trappm.store import LabelFilter, Store
from trappm.store.sql import FLAT_COLUMNS

TIMEOUT_S = 20.0


@pytest.fixture
def filled_store(store):
    for batch_size in (1, 2, 3):
        store.measurements.record_many(
            [measurement(configuration(batch_size), step_ms=float(batch_size))]
        )
    return store


def is_postgresql(url):
    return make_url(url).get_backend_name() == "postgresql"


def rows(store, statement, **options):
    frame, more = store.query_sql(statement, **options)
    assert not more
    return frame.values.tolist()


def test_select_statements_are_executed(filled_store, database_url):
    with Store.open_to_read(database_url) as readable:
        for store in (filled_store, readable):
            assert rows(store, "SELECT count(*) FROM labels") == [[3]]
            assert rows(store, "VALUES (1, 'a%b'), (2, NULL);") == [[1, "a%b"], [2, None]]
            assert rows(store, "SELECT 1 WHERE 1 = 0") == []
            assert rows(
                store,
                "WITH slow AS (SELECT * FROM labels WHERE step_time_ms >= 2) -- comment\n"
                "SELECT c.batch_size, s.step_time_ms FROM slow s"
                " JOIN configurations c ON c.id = s.configuration_id ORDER BY 1",
            ) == [[2, 2.0], [3, 3.0]]
            assert rows(
                store,
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5)"
                " SELECT sum(i), abs(min(random())) >= 0 FROM n",
            )[0][0] == 15  # fmt: skip


def test_labels_are_a_flat_table(filled_store, database_url):
    with Store.open_to_read(database_url) as readable:
        for store in (filled_store, readable):
            assert rows(
                store,
                "SELECT architecture, batch_size, device, step_time_ms FROM labels"
                " WHERE step_time_ms > 1 ORDER BY step_time_ms DESC;",
            ) == [["resnet18", 3, DEVICE, 3.0], ["resnet18", 2, DEVICE, 2.0]]
            assert rows(
                store,
                "WITH labels AS (SELECT family FROM configurations)"
                " SELECT DISTINCT family FROM labels",
            ) == [["resnet"]]  # a name of their own comes first
            frame, _ = store.query_sql("SELECT * FROM labels")
            assert list(frame.columns) == list(FLAT_COLUMNS)
            by_query = store.labels.query(LabelFilter())
            assert list(by_query.columns) == list(frame.columns)[: len(by_query.columns)]
            assert frame.id.tolist() == by_query.id.tolist()


def test_more_rows_than_the_limit_are_reported(filled_store):
    frame, more = filled_store.query_sql("SELECT id FROM labels ORDER BY id", limit=2)
    assert (len(frame), more) == (2, True)
    frame, more = filled_store.query_sql("SELECT id FROM labels ORDER BY id", limit=3)
    assert (len(frame), more) == (3, False)


def test_endless_statements_time_out(filled_store):
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    )
    with pytest.raises(InputError, match=r"stopped after 0\.2 s"):
        filled_store.query_sql(endless, timeout_s=0.2)
    assert rows(filled_store, "SELECT count(*) FROM labels") == [[3]]


WRITES = [
    "INSERT INTO events (campaign_id, at, kind, message) VALUES ('a', '2026-01-01', 'k', '{}')",
    "DELETE FROM labels",
    "WITH gone AS (DELETE FROM labels RETURNING id) SELECT * FROM gone",
    "SELECT 1; ROLLBACK; BEGIN; DELETE FROM labels; COMMIT",
    "COMMIT",
    "EXPLAIN ANALYZE DELETE FROM labels",
    "SELECT 1 \0; DELETE FROM labels",
]
SQLITE_WRITES = [
    "SELECT load_extension('{file}')",
    "SELECT writefile('{file}', 'x')",
    "CREATE VIRTUAL TABLE mine USING fts5(a)",
]
POSTGRESQL_WRITES = [
    "SELECT 1; SET TRANSACTION READ WRITE; DELETE FROM labels",
    "SELECT lo_from_bytea(0, 'x')",
    "SELECT * FROM public.labels FOR UPDATE",
    "COPY labels TO PROGRAM 'cat > {file}'",
    "DO $$ BEGIN DELETE FROM labels; END $$",
    "PREPARE mine AS DELETE FROM labels",
    "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "SELECT 1; END; DELETE FROM labels; --",
    "SELECT 1) AS a; COMMIT; DELETE FROM labels; SELECT * FROM (SELECT 1",
]


def test_statements_that_write_are_refused(filled_store, database_url, tmp_path):
    before = contents(database_url)
    target = tmp_path / "written"
    mine = POSTGRESQL_WRITES if is_postgresql(database_url) else SQLITE_WRITES
    with Store.open_to_read(database_url) as readable:
        stores = cycle([filled_store, readable])  # opened to read or not: a question only reads
        for statement, store in zip([*WRITES, *mine], stores, strict=False):
            with pytest.raises(InputError) as caught:
                store.query_sql(statement.replace("{file}", str(target)), timeout_s=TIMEOUT_S)
            assert "\n" not in str(caught.value), statement
    assert contents(database_url) == before
    assert not target.exists()
    assert rows(filled_store, "SELECT count(*) FROM labels") == [[3]]
