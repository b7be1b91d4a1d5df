"""The fork server by itself, without torch: what children do to its pipes and to each other."""

import contextlib
import os
import time

import pytest

import trappm.profiler.host.forks
from trappm.profiler.host.forks import ForkServer, ForkServerError


def echo(argument, send):
    for number in range(argument["times"]):
        send({"number": number, "text": argument["text"]})


def scribble(argument, send):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"no message\n")
    time.sleep(60)


def never_end_a_line(argument, send):
    while True:
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"x" * (1 << 16))


def talk_on(argument, send):
    while True:
        send({"still": "here"})


def say_last_words(argument, send):
    os.write(2, b"first " + b"x" * 100_000 + b" last words")
    os._exit(7)


@pytest.fixture(scope="module")
def server():
    server = ForkServer(())
    yield server
    server.stop()


def test_messages_arrive_whole_and_in_order(server):
    text = "long " * 12_000  # nearly what a request or a pipe holds
    child = server.fork("test_forks:echo", {"times": 5, "text": ""})
    assert [m["number"] for m in child.messages(lambda: time.monotonic() + 60)] == [*range(5)]
    child.close()
    child = server.fork("test_forks:echo", {"times": 2, "text": text})
    assert [m["text"] for m in child.messages(lambda: time.monotonic() + 60)] == [text] * 2
    assert child.exit_code == 0
    child.close()


def test_only_the_end_of_the_output_is_kept(server):
    child = server.fork("test_forks:say_last_words", {})
    assert list(child.messages(lambda: time.monotonic() + 60)) == []
    child.close()
    assert child.exit_code == 7
    assert server.printed.endswith("last words")
    assert "first" not in server.printed
    child = server.fork("test_forks:echo", {"times": 1, "text": ""})
    list(child.messages(lambda: time.monotonic() + 60))
    child.close()
    assert server.printed == ""  # nothing of the child before


def test_endless_messages_do_not_pass_the_deadline(server):
    child = server.fork("test_forks:talk_on", {})
    deadline = time.monotonic() + 0.3
    with pytest.raises(TimeoutError):
        for _ in child.messages(lambda: deadline):
            pass
    child.kill()
    child.close()
    assert child.exit_code == -9


@pytest.mark.parametrize("function", ["scribble", "never_end_a_line"])
def test_invalid_messages_are_reported(function, server, monkeypatch):
    monkeypatch.setattr(trappm.profiler.host.forks, "_MAX_MESSAGE_BYTES", 1 << 20)
    child = server.fork(f"test_forks:{function}", {})
    with pytest.raises(ForkServerError, match="something else wrote"):
        list(child.messages(lambda: time.monotonic() + 60))
    child.kill()
    child.close()
    child = server.fork("test_forks:echo", {"times": 1, "text": "again"})
    assert [m["text"] for m in child.messages(lambda: time.monotonic() + 60)] == ["again"]
    child.close()


def test_a_server_that_cannot_start_gives_the_reason():
    with pytest.raises(ForkServerError, match="no_such_module"):
        ForkServer(("no_such_module",)).start()
