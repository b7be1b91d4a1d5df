"""The server as people run it: a process of its own, a port, files that nobody has seen before."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from onnx_export import export_onnx
from serving_samples import QUESTION, other_snapshot

import trappm
from trappm.learner.snapshots.registry import Registry

ROOT = Path(__file__).parents[3]
INCOMPLETE_S = 3.0
PROGRAM = f"""
from trappm.extensions.web import connections
connections.INCOMPLETE_S = {INCOMPLETE_S}  # 10 s as it ships
from trappm.cli import main
main()
"""
COMMAND = [sys.executable, "-c", PROGRAM, "serve", "--port", "0"]


@pytest.fixture(scope="module")
def home(module_home):
    return module_home


@contextmanager
def running(*options, **variables):
    """A server with a data folder, and its port."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables}
    with subprocess.Popen(
        [*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, cwd=ROOT, start_new_session=True,
    ) as process:  # fmt: skip
        yield process, int(re.search(r":(\d+) ", process.stdout.readline())[1])


@pytest.fixture(scope="module")
def server(home):
    """The process and its port."""
    with running("--timeout", "60") as (process, port):
        try:
            yield process, port
        finally:
            process.terminate()
            process.wait(60)


def ask(port, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
    connection.request("GET" if body is None else "POST", path, body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def form(name, data, question):
    head = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    tail = (
        f'\r\n--x\r\nContent-Disposition: form-data; name="question"\r\n\r\n{question}\r\n--x--\r\n'
    )
    return head.encode() + data + tail.encode()


FORM = {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.mark.extension("onnx")
def test_uploaded_file_gives_the_result_of_the_command(server, tmp_path):
    _, port = server
    path = tmp_path / "mine.onnx"
    export_onnx("test_resnet", 64, path)
    question = json.dumps({"device": "a100", "batch_size": 8})
    status, answer = ask(
        port, "/v1/predict/upload", form("../x/mine.onnx", path.read_bytes(), question), **FORM
    )
    assert status == 200, answer
    mine = trappm.predict(path, device="a100", batch_size=8)
    assert answer == {**json.loads(json.dumps(mine.to_dict())), "model": "mine.onnx"}

    status, answer = ask(port, "/v1/predict", json.dumps({**QUESTION, "model": "nosuch"}))
    assert (status, answer["type"]) == (404, "urn:trappm:problem:unknown-architecture")


def test_server_follows_the_alias(server, home):
    _, port = server
    newest = other_snapshot(home / "snapshots", "newest")
    Registry(home / "snapshots").set_alias("latest", newest, "published")
    deadline = time.monotonic() + 30
    while ask(port, "/readyz")[1]["snapshots"][0] != newest:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert ask(port, "/v1/predict", json.dumps(QUESTION))[1]["snapshot"] == newest


def test_half_sent_requests_are_closed_and_shut_nobody_out(server):
    _, port = server
    held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(300)]
    begin = time.monotonic()
    for connection in held:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0")
    for path in ("/healthz", "/v1/devices"):
        assert ask(port, path)[0] == 200
    bodies = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(64)]
    for connection in bodies:  # announced, and never sent
        connection.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                           b"Content-Length: 100\r\n\r\n{")  # fmt: skip
    assert ask(port, "/v1/devices")[0] == 503
    for connection in (*held[-2:], *bodies):
        assert closed(connection)
    took_s = time.monotonic() - begin
    assert INCOMPLETE_S - 1 < took_s < INCOMPLETE_S + 10
    assert ask(port, "/v1/devices")[0] == 200
    for connection in (*held, *bodies):
        connection.close()


def closed(connection):
    """Whether the server closes a connection without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@contextmanager
def asked(port, question):
    """Asks meanwhile; the status of the answer is there at the end."""
    statuses = []
    asking = threading.Thread(target=lambda: statuses.append(ask(port, "/v1/predict", question)[0]))
    asking.start()
    yield statuses
    asking.join(30)


def test_ctrl_c_twice_during_a_request_shows_no_traceback(home, tmp_path):
    question = json.dumps({**QUESTION, "model": "resnet50"})  # has to be traced
    opened, browser = tmp_path / "opened", tmp_path / "browser.sh"
    browser.write_text(f'echo "$1" > {opened}\n')
    opening = running("--open", BROWSER=f"sh {browser} %s")
    with opening as (process, port), asked(port, question) as statuses:
        for _ in range(2):
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert statuses in ([200], [503])
    assert "Traceback" not in errors
    assert opened.read_text() == f"http://127.0.0.1:{port}/\n"


def test_server_finishes_requests_before_it_stops(server):
    process, port = server
    fresh = json.dumps({**QUESTION, "batch_size": 333, "model": ["test_resnet"] * 20})
    with asked(port, fresh) as statuses:
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    assert statuses == [200]
    assert process.wait(30) in {0, -signal.SIGTERM}
