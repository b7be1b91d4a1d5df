"""A PostgreSQL server's user who must name a password, by SCRAM, beside its trusted superuser."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, create_engine

USER = "guarded"


def guard(server: URL, database: str, password: str) -> URL:
    """The URL, without the password, of a new database that only this user and password open.

    Args:
        server: of the superuser, whom it trusts.
        database: of a name that is not there yet.
        password: of the user `USER` from now on.
    """
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        run = connection.exec_driver_sql
        if not run(f"SELECT 1 FROM pg_roles WHERE rolname = '{USER}'").first():  # noqa: S608
            run(f"CREATE ROLE {USER} LOGIN")
        run(f"ALTER ROLE {USER} PASSWORD '{password}'")
        run(f"CREATE DATABASE {database} OWNER {USER}")
        rules = Path(run("SHOW hba_file").scalar_one())
        rule = f"local all {USER} scram-sha-256\n"
        if rule not in rules.read_text():
            rules.write_text(rule + rules.read_text())
        run("SELECT pg_reload_conf()")
    engine.dispose()
    return server.set(username=USER, database=database)
