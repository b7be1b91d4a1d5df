"""The same application run by Ray Serve: two replicas, one of which dies."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from serving_samples import QUESTION

import trappm

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-c", "from trappm.cli import main; main()", "serve"]


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def ask(port, question):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/predict", json.dumps(question))
    response = connection.getresponse()
    return response.status, json.loads(response.read())


@pytest.mark.slow
def test_a_replica_dies_and_others_answer(tmp_path, monkeypatch):
    pytest.importorskip("ray.serve")
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    port = free_port()
    command = [*COMMAND, "--replicas", "2", "--port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        try:
            assert any(f"http://127.0.0.1:{port} " in line for line in process.stdout)
            family = psutil.Process(process.pid).children(recursive=True)
            replicas = [p for p in family if "ServeReplica:trappm" in " ".join(p.cmdline())]
            assert len(replicas) == 2
            status, answer = ask(port, QUESTION)
            mine = trappm.predict(QUESTION)
            assert (status, answer) == (200, json.loads(json.dumps(mine.to_dict())))
            replicas[0].kill()
            for _ in range(20):
                assert ask(port, QUESTION) == (status, answer)
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    left = psutil.wait_procs(family, timeout=20)[1]
    assert [" ".join(p.cmdline()) for p in left] == []
