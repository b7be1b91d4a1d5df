"""`store check`: nothing is found in a whole store, and every fault that is put in is."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from store_faults import FAULTS, IN_OTHER_WORDS, ORPHANS, VALUES, findings, inject
from store_samples import configuration, measurement

from trappm.store import Store


def test_nothing_is_found_in_a_whole_store(whole_url):
    assert findings(whole_url) == {}
    engine = create_engine(whole_url)
    with engine.connect() as connection, Store.open_to_read(whole_url) as store:
        empty = {name for name, count in store.maintenance.stats().rows.items() if not count}
        assert empty == set(), "fill() must put rows into every table"
        assert connection.execute(text("SELECT count(*) FROM labels")).scalar() == 3
    engine.dispose()


CASES = [("sqlite", name) for name in FAULTS]
CASES += [
    pytest.param("postgresql", name, marks=() if name in IN_OTHER_WORDS else pytest.mark.slow)
    for name, (_, expected) in FAULTS.items()
    if ORPHANS not in expected  # which PostgreSQL itself sees to
]


@pytest.mark.parametrize(("databases", "name"), CASES, indirect=["databases"])
def test_a_fault_is_found_and_nothing_else(whole_url, name):
    statements, expected = FAULTS[name]
    values = {key: v for key, v in VALUES.items() if any(f":{key}" in s for s in statements)}
    for statement in statements:
        inject(whole_url, statement, **{k: v for k, v in values.items() if f":{k}" in statement})
    faults = findings(whole_url)
    assert set(faults) == set(expected)
    for what, example in expected.items():
        finding = faults[what]
        assert finding.count == 1
        assert finding.mend
        assert example in {None, finding.example}
        if finding.sql is not None:  # it lists exactly what is told
            engine = create_engine(whole_url)
            with engine.connect() as connection:
                rows = [", ".join(map(str, row)) for row in connection.exec_driver_sql(finding.sql)]
            engine.dispose()
            assert rows == [finding.example]


def test_nothing_that_is_damaged_is_changed(whole_url):
    inject(whole_url, "DELETE FROM labels WHERE id = 2")
    assert findings(whole_url).keys() == findings(whole_url).keys() != set()


def test_every_row_of_a_fault_is_counted(whole_url):
    inject(whole_url, "DELETE FROM labels")
    finding = findings(whole_url)["measurements without the label that they make"]
    assert (finding.count, finding.example) == (3, "1")


def test_a_table_made_anew_without_its_constraints_is_told(whole_url):
    inject(
        whole_url,
        "CREATE TABLE made_anew AS SELECT * FROM pool_members",
        "DROP TABLE pool_members",
        "ALTER TABLE made_anew RENAME TO pool_members",
        "INSERT INTO pool_members SELECT * FROM pool_members WHERE pool_id = 1",
        "INSERT INTO pool_members VALUES (NULL, 's1')",
    )
    faults = findings(whole_url)
    assert faults["differences between the schema and that of this version"].count > 0


def test_tables_and_indices_of_others_are_no_fault(whole_url):
    inject(
        whole_url,
        "CREATE TABLE somebodys (id INTEGER)",
        "CREATE INDEX somebodys_index ON labels (power_w)",
    )
    assert findings(whole_url) == {}


def test_a_page_of_nonsense_is_told_and_nothing_more(whole_url, tmp_path):
    url = make_url(whole_url)
    if url.get_backend_name() != "sqlite":
        pytest.skip("PostgreSQL looks after its own files")
    path = tmp_path / "labels.db"
    with closing(sqlite3.connect(url.database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page_size = connection.execute("PRAGMA page_size").fetchone()[0]
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'labels'"
        ).fetchone()
    data = bytearray(Path(url.database).read_bytes())
    data[(root - 1) * page_size : root * page_size] = b"\xff" * page_size
    path.write_bytes(data)
    (finding,) = findings(f"sqlite:///{path}").values()
    assert finding.what.startswith("damage to the database file")
    assert "restore a backup" in finding.mend


def test_what_is_recorded_meanwhile_is_no_fault(whole_url):
    """All is read at one point in time, although another connection writes between the reads."""
    with Store.open(whole_url) as writer, Store.open_to_read(whole_url) as reader:
        for batch_size in range(100, 105):
            writer.measurements.record(measurement(configuration(batch_size)))
            assert reader.maintenance.check() == []
