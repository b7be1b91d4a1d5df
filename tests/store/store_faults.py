"""Faults of a store for its tests: rows that cannot be, and commits whose reply is lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager

from sqlalchemy import create_engine, make_url, text
from store_samples import template

from trappm.store import Store


@contextmanager
def lost_reply(store):
    """The next commit succeeds, but the connection is lost before its reply comes."""
    dialect = store.database.engine.dialect
    do_commit = dialect.do_commit
    lost = []

    def commit(connection):
        do_commit(connection)
        if lost:
            return
        lost.append(connection)
        if dialect.name == "sqlite":
            error = sqlite3.OperationalError("disk I/O is away")
            error.sqlite_errorname = "SQLITE_CANTOPEN"
            raise error
        connection.driver_connection.close()
        raise dialect.loaded_dbapi.OperationalError("consuming input failed")

    dialect.do_commit = commit
    try:
        yield
    finally:
        dialect.do_commit = do_commit
    assert lost


def inject(url, *statements, **values):
    """Runs statements where no constraint holds; afterwards all are as they were."""
    if make_url(url).get_backend_name() == "sqlite":
        with closing(sqlite3.connect(make_url(url).database, isolation_level=None)) as connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            for statement in statements:
                connection.execute(statement, values)
        return
    engine = create_engine(url)
    with engine.begin() as connection:
        checks = connection.execute(
            text(
                "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)"
                " FROM pg_constraint WHERE contype = 'c' AND connamespace = 'public'::regnamespace"
            )
        ).all()
        connection.execute(text("SET session_replication_role = replica"))
        for table, name, _ in checks:
            connection.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT {name}"))
        for statement in statements:
            connection.execute(text(statement), values)
        for table, name, rule in checks:
            connection.exec_driver_sql(
                f"ALTER TABLE {table} ADD CONSTRAINT {name} {rule} NOT VALID"
            )
    engine.dispose()


def findings(url):
    with Store.open_to_read(url) as store:
        return {finding.what: finding for finding in store.maintenance.check()}


ORPHANS = "rows without the row that they refer to (PRAGMA foreign_key_check)"

# Of the whole store: measurement 1 is of round 0, 2 is ok, 3 ran out of memory, 4 is unsupported;
# labels 1 to 3 are of measurements 1 to 3.
FAULTS = {
    "labels without their measurement": (
        ["DELETE FROM measurements WHERE id = 2"],
        {ORPHANS: None},
    ),
    "links without a label": (
        ["DELETE FROM labels WHERE id = 2"],
        {
            ORPHANS: None,
            "measurements without the label that they make": "2",
        },
    ),
    "a censored label that was lost": (
        ["DELETE FROM labels WHERE id = 3"],
        {
            ORPHANS: None,
            "measurements without the label that they make": "3",
        },
    ),
    "a label of a bound although there is a value": (
        [
            "UPDATE measurements SET outcome = 'ok', memory_mib = 9, assignment_id = NULL,"
            " configuration_id = (SELECT configuration_id FROM labels WHERE id = 3) WHERE id = 4"
        ],
        {
            "labels although a measurement is worth more": "3",
            "assignments done without a label or an attempt": None,
        },
    ),
    "an imported label although it was measured": (
        [
            "UPDATE measurements SET provenance = 'imported' WHERE id = 3",
            "UPDATE labels SET provenance = 'imported' WHERE id = 3",
            "UPDATE measurements SET outcome = 'ok', memory_mib = 9, assignment_id = NULL,"
            " configuration_id = (SELECT configuration_id FROM labels WHERE id = 3) WHERE id = 4",
        ],
        {
            "labels although a measurement is worth more": "3",
            "assignments done without a label or an attempt": None,
        },
    ),
    "links without an assignment": (
        ["UPDATE assignment_labels SET assignment_id = 'gone' WHERE label_id = 1"],
        {
            ORPHANS: None,
        },
    ),
    "measurements without a configuration": (
        [
            "UPDATE measurements SET configuration_id = 'gone' WHERE id = 4",
            "UPDATE measurements SET assignment_id = NULL WHERE id = 4",
        ],
        {
            ORPHANS: None,
            "assignments done without a label or an attempt": None,
        },
    ),
    "infinite power": (
        [
            "UPDATE measurements SET power_w = :infinite WHERE id = 2",
            "UPDATE labels SET power_w = :infinite WHERE measurement_id = 2",
        ],
        {
            "measurements with a number that is not finite": "2",
        },
    ),
    "more memory than the device has": (
        [
            "UPDATE measurements SET memory_mib = 500, environment = :environment WHERE id = 2",
            "UPDATE labels SET memory_mib = 500 WHERE measurement_id = 2",
        ],
        {"measurements of more memory than there is": "2"},
    ),
    "more memory than the measurement names": (
        ["""UPDATE measurements SET memory_detail_mib = '{"capacity": 200}' WHERE id = 2"""],
        {"measurements of more memory than there is": "2"},
    ),
    "a label that differs from its measurement": (
        ["UPDATE labels SET memory_mib = 322.5 WHERE id = 2"],
        {"labels whose values differ from their measurement": "2"},
    ),
    "a label that lacks what was measured": (
        ["UPDATE labels SET power_w = NULL WHERE id = 2"],
        {"labels whose values differ from their measurement": "2"},
    ),
    "a label of another protocol": (
        ["UPDATE labels SET protocol_name = 'other' WHERE id = 2"],
        {
            "labels of something else than their measurement": "2",
            "measurements without the label that they make": "2",
        },
    ),
    "a censored label with another bound": (
        ["UPDATE labels SET memory_above_mib = 9 WHERE measurement_id = 3"],
        {"censored labels that say something else than that memory ran out": "3"},
    ),
    "a censored label with a time": (
        ["UPDATE labels SET step_time_ms = 9 WHERE measurement_id = 3"],
        {"censored labels that say something else than that memory ran out": "3"},
    ),
    "a label that says otherwise how its measurement ended": (
        ["UPDATE labels SET outcome = 'oom' WHERE id = 2"],
        {ORPHANS: None},
    ),
    "a label of an attempt that failed": (
        ["UPDATE measurements SET outcome = 'timeout' WHERE id = 3"],
        {ORPHANS: None},
    ),
    "a 95th percentile below the median": (
        ["UPDATE measurements SET step_p95_ms = 1 WHERE id = 2"],
        {"measurements whose summary of the step cannot be": "2"},
    ),
    "more than a whole step": (
        ["UPDATE measurements SET step_forward_share = 1.5 WHERE id = 2"],
        {"measurements whose summary of the step cannot be": "2"},
    ),
    "raw samples that were cut off": (
        ["UPDATE measurements SET step_samples_ms = :cut WHERE id = 2"],
        {"measurements with raw samples that cannot be": "2"},
    ),
    "a raw sample that is no number": (
        ["UPDATE measurements SET step_samples_ms = :nan WHERE id = 2"],
        {"measurements with raw samples that cannot be": "2"},
    ),
    "a lease in a campaign that is over": (
        ["UPDATE campaigns SET state = 'finished', finished_at = created_at"],
        {"leases in campaigns that have ended": None},
    ),
    "a lease of the dead": (
        ["UPDATE campaigns SET owner_seen_at = '2001-02-03 04:05:06.000000'"],
        {"leases of campaigns that nobody runs": None},
    ),
    "a closed round with something to do": (
        ["UPDATE rounds SET state = 'closed', report = '{}' WHERE number = 1"],
        {"assignments still to do in rounds that are closed": None},
    ),
    "an assignment that is open and has a label": (
        [
            "UPDATE assignments SET state = 'open'"
            " WHERE id = (SELECT assignment_id FROM measurements WHERE id = 2)"
        ],
        {"assignments with a label that are not done": None},
    ),
    "an assignment with the label of another": (
        ["UPDATE assignment_labels SET label_id = 1 WHERE label_id = 2"],
        {"assignments with the label of something else": None},
    ),
    "a measurement for another assignment": (
        [
            "UPDATE measurements SET assignment_id ="
            " (SELECT assignment_id FROM measurements WHERE id = 2) WHERE id = 4"
        ],
        {
            "measurements of something else than their assignment": "4",
            "assignments done without a label or an attempt": None,
        },
    ),
    "training on what is held out": (
        ["UPDATE assignments SET role = 'train'"],
        {"assignments to train on what is held out for evaluation": None},
    ),
    "a graph of another hash": (
        ["UPDATE graphs SET template = :other_graph"],
        {"graphs whose bytes do not give their hash": None},
    ),
    "a graph of no bytes": (
        ["UPDATE graphs SET template = :cut"],
        {"graphs whose bytes do not give their hash": None},
    ),
    "a graph of another size": (
        ["UPDATE graphs SET node_count = 7"],
        {"graphs whose bytes do not give their hash": None},
    ),
    "a step profile of other figures": (
        ["UPDATE step_profiles SET trainable_parameters = 1"],
        {"step profiles whose bytes do not give their figures": "resnet18, 64"},
    ),
    "a step profile without a graph": (
        ["UPDATE step_profiles SET architecture = 'odd'"],
        {"step profiles of architectures without a graph": "odd, 64"},
    ),
    "a configuration under another id": (
        ["UPDATE configurations SET batch_size = 99 WHERE batch_size = 5"],
        {"configurations whose id is not their own": None},
    ),
    "a precision that does not exist": (
        ["UPDATE configurations SET \"precision\" = 'fp1' WHERE batch_size = 5"],
        {"configurations whose id is not their own": None},
    ),
    "an index that was lost": (
        ["DROP INDEX ix_labels_device_id"],
        {"differences between the schema and that of this version": None},
    ),
    "a column that was lost": (
        ["ALTER TABLE canaries DROP COLUMN relative_drift"],
        {"differences between the schema and that of this version": None},
    ),
}

VALUES = {
    "infinite": float("inf"),
    "environment": '{"device_memory_mib": 400, "host_memory_mib": 100000}',
    "cut": b"123",
    "nan": b"\x00\x00\xc0\x7f",
    "other_graph": template(macs=11).to_bytes(),
}

IN_OTHER_WORDS = {
    "a censored label that was lost",
    "a label of a bound although there is a value",
    "labels without their measurement",
    "infinite power",
    "more memory than the device has",
    "a censored label with another bound",
    "raw samples that were cut off",
    "a lease of the dead",
    "training on what is held out",
    "a graph of no bytes",
    "a column that was lost",
}
"""What PostgreSQL is asked for in SQL of its own; the rest only repeats there what SQLite says."""
