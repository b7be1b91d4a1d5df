"""The fork server by itself, without torch: what children do to its pipes and to each other."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

import psutil
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


def hang(argument, send):
    send({"child": os.getpid(), "server": os.getppid()})
    time.sleep(60)


@pytest.fixture(scope="module")
def server():
    server = ForkServer(())
    yield server
    server.stop()


def messages(server, function, **argument):
    """All messages of a child, and its exit code."""
    child = server.fork(f"test_forks:{function}", argument)
    sent = list(child.messages(lambda: time.monotonic() + 60))
    child.close()
    return sent, child.exit_code


@pytest.mark.parametrize("text", ["", "long " * 12_000])  # nearly what a request or a pipe holds
def test_messages_arrive_whole_and_in_order(server, text):
    expected = [{"number": number, "text": text} for number in range(5)]
    assert messages(server, "echo", times=5, text=text) == (expected, 0)


def test_only_the_end_of_the_output_is_kept(server):
    assert messages(server, "say_last_words") == ([], 7)
    assert server.printed.endswith("last words")
    assert "first" not in server.printed
    messages(server, "echo", times=1, text="")
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
    assert messages(server, "echo", times=1, text="again")[0] == [{"number": 0, "text": "again"}]


WORKER = """
import json, time
from trappm.profiler.host.forks import ForkServer
server = ForkServer(())
child = server.fork("test_forks:hang", {})
print(json.dumps(next(child.messages(lambda: time.monotonic() + 60))), flush=True)
time.sleep(60)
"""


def test_a_killed_worker_leaves_neither_server_nor_child():
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    started = [psutil.Process(pid) for pid in json.loads(worker.stdout.readline()).values()]
    worker.kill()
    worker.communicate()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []


LIBCUDA = """
static int result = 3;
int cuInit(unsigned flags) { (void)flags; return result = 0; }
int cuDeviceGetCount(int *count) { *count = 1; return result; }
"""


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        ("import ctypes; ctypes.CDLL({library!r})", None),  # loaded, and not used
        ("import ctypes; ctypes.CDLL({library!r}).cuInit(0)", "initialized .*libcuda.so.1: CUDA"),
        ("node = open({node!r})", "opened .*/dev/nvidiactl: CUDA would fail in forks"),
    ],
)
def test_modules_that_use_a_gpu_are_refused_before_any_fork(code, refusal, tmp_path, monkeypatch):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) here to build a stub of libcuda with")
    library, node = tmp_path / "libcuda.so.1", tmp_path / "dev/nvidiactl"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=LIBCUDA, text=True, check=True)
    node.parent.mkdir()
    node.touch()
    (tmp_path / "as_triton.py").write_text(code.format(library=str(library), node=str(node)))
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(("json", "as_triton"))
    try:
        if refusal is None:
            server.start()
        else:
            with pytest.raises(ForkServerError, match=f"the import of as_triton {refusal}"):
                server.start()
    finally:
        server.stop()
