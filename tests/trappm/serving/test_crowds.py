"""Callers who leave, dawdle or come in crowds keep nobody else out."""

import asyncio
import http.client
import itertools
import json
import re
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from onnx import TensorProto, helper
from onnx_export import export_onnx
from serving_samples import QUESTION, Asker

from trappm.serving.answers.tracing import Tracers
from trappm.serving.answers.turns import Shared, Turns
from trappm.serving.answers.uploads import Upload
from trappm.serving.problems import BusyError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAPPM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def test_clients_get_their_turns_one_after_the_other():
    order = []

    async def work(turns, client):
        async with turns.turn(client):
            order.append(client)
            await asyncio.sleep(0)

    async def crowd():
        turns = Turns(1, 10, 4)
        tasks = [asyncio.create_task(work(turns, client)) for client in "AAAAABBC"]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="7 models wait"):
            await work(turns, "A")  # four of its own wait already
        tasks[1].cancel()  # it leaves, and others move up
        await asyncio.gather(*tasks, return_exceptions=True)
        await work(turns, "D")

    asyncio.run(crowd())
    assert "".join(order) == "ABCABAAD"


def test_a_turn_that_comes_as_its_owner_leaves_goes_to_the_next():
    async def crowd():
        turns, order = Turns(1, 10, 4), []

        async def work(name):
            async with turns.turn(name):
                order.append(name)

        async with turns.turn("first"):
            leaving, staying = (asyncio.create_task(work(name)) for name in "xy")
            await asyncio.sleep(0)
        leaving.cancel()  # its turn has come, but it has not run since
        await asyncio.gather(leaving, staying, return_exceptions=True)
        await work("z")
        return order

    assert asyncio.run(asyncio.wait_for(crowd(), 10)) == ["y", "z"]


def test_shared_work_ends_with_the_last_who_waits_for_it():
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def crowd():
        shared = Shared()
        first, second = (asyncio.create_task(shared.wait("k", work)) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert not ended
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await asyncio.sleep(0)
        assert ended == [True]
        assert await shared.wait("k", lambda: asyncio.sleep(0, "anew")) == "anew"

    asyncio.run(crowd())


def upload(path):
    with path.open("rb") as file:
        return Upload(file, 1 << 30).model(path.name, None)


def test_a_look_ends_with_its_caller_and_the_next_model_is_looked_at(tmp_path):
    """On the real process: whose caller leaves while it works, and whose callers leave in a row."""
    names = ["x", *(f"t{i}" for i in range(11_900)), "y"]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 3, 8, 8]) for n in "xy"]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3, 3, 1, 1], [0] * 9)
    chain = [helper.make_node("Conv", [a, "w"], [b]) for a, b in itertools.pairwise(names)]
    graph = helper.make_graph(chain, "g", ends[:1], ends[1:], [weight])
    (tmp_path / "long.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    export_onnx("test_resnet", 64, tmp_path / "sound.onnx")
    long, sound = (upload(tmp_path / f"{name}.onnx") for name in ("long", "sound"))

    async def crowd():
        tracers = Tracers(1, 300, 1024)
        others = psutil.Process().children()  # tests before this one left theirs warm
        tracers._all[0].start()
        mine = (c for c in psutil.Process().children() if c not in others)
        (server,) = (c for c in mine if "trappm-tracing-" in c.cwd())
        leaving = [asyncio.create_task(tracers.trace(long, [], "A")) for _ in range(2)]
        while not server.children():
            await asyncio.sleep(0.01)
        (looking,) = server.children()
        leaving[0].cancel()
        await asyncio.sleep(0.1)
        assert looking.is_running()  # one waits for it yet
        leaving[1].cancel()
        await tracers.trace(sound, [], "B")
        assert not looking.is_running()
        assert server.is_running()  # still warm
        tracers.close()

    asyncio.run(crowd())


def test_work_ends_when_its_caller_hangs_up(monkeypatch):
    ended = []

    async def never(*_):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(True)
            raise

    async def hang_up(asker):
        parts = [
            {"type": "http.request", "body": json.dumps(QUESTION).encode(), "more_body": False},
            {"type": "http.disconnect"},
        ]
        sent = []

        async def receive():
            return parts.pop(0)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/predict", "headers": [],
                 "query_string": b"", "client": ("10.0.0.1", 1)}  # fmt: skip
        await asyncio.wait_for(asker.app(scope, receive, send), 30)
        return sent

    with Asker() as asker:
        monkeypatch.setattr(asker.app.state.answerer, "predict", never)
        assert asker.run(hang_up(asker)) == []
        assert ended == [True]


def test_bodies_that_do_not_come_keep_nobody_out():
    with Asker(max_requests=2, body_timeout_s=0.3) as asker:

        async def crowd():
            slow = [
                asyncio.create_task(asker.ask("POST", "/v1/predict", [b"{"], never=True))
                for _ in range(8)
            ]
            await asyncio.sleep(0.05)
            other = await asker.ask("GET", "/v1/devices", [b""])
            return other, await asyncio.gather(*slow)

        other, slow = asker.run(crowd())
        assert other.status == 200
        assert {response.status for response in slow} == {408}
        assert {response.headers["connection"] for response in slow} == {"close"}
        assert "came too slowly" in slow[0].json["detail"]


def test_one_client_has_half_of_the_uploads():
    kind = {"content-type": "multipart/form-data; boundary=x"}
    with Asker(max_uploads=4, body_timeout_s=0.3) as asker:

        async def crowd():
            ask = partial(asker.ask, "POST", "/v1/predict/upload", [b"--x"], kind, never=True)
            uploads = [asyncio.create_task(ask()) for _ in range(4)]
            return [response.status for response in await asyncio.gather(*uploads)]

        assert sorted(asker.run(crowd())) == [408, 408, 503, 503]


def test_half_sent_headers_keep_nobody_out():
    """More of them than the process may have files, each with a byte more now and then."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)); "
        "from trappm.cli import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True,
        cwd=ROOT,
    ) as process:  # fmt: skip
        crowd = []
        try:
            port = int(re.search(r":(\d+) ", process.stdout.readline())[1])
            kept = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            for _ in range(1200):
                connection = socket.create_connection(("127.0.0.1", port), 10)
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1")
                crowd.append(connection)
            kept.request("GET", "/healthz")
            assert kept.getresponse().status == 200
            deadline = time.monotonic() + 120
            while psutil.Process(process.pid).net_connections():
                if time.monotonic() > deadline or not any(map(_open, crowd)):
                    break
                time.sleep(0.5)
                for connection in crowd:
                    _trickle(connection)
            assert not any(map(_open, crowd))
        finally:
            for connection in crowd:
                connection.close()
            process.terminate()
            process.wait(60)


def _trickle(connection):
    try:
        connection.send(b" ")
    except OSError:
        connection.close()


def _open(connection):
    if connection.fileno() < 0:
        return False
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
