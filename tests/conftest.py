"""What every test starts from: no label store of the developer's own, every core, one thread."""

import json
import os
import sys
import uuid
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import pytest
from hypothesis import settings

from trappm.profiler.errors import InputError

settings.register_profile("shared cores", deadline=None)  # no test asserts a time
settings.load_profile("shared cores")
os.environ.pop("TRAPPM_DATABASE", None)
# Several tests run at once. Threads of OpenMP that wait for a core that another test has spin.
# Devices set the threads of what they measure themselves.
os.environ["OMP_NUM_THREADS"] = "1"
_CORES = os.sched_getaffinity(0)


def pytest_collection_modifyitems(items):
    """Skip tests of the core that need an extension whose folder was deleted."""
    for item in items:
        for mark in item.iter_markers("extension"):
            if find_spec(f"trappm.extensions.{mark.args[0]}") is None:
                item.add_marker(pytest.mark.skip(reason=f"no extension {mark.args[0]}"))


@pytest.fixture(scope="session")
def s3_server():
    """The address of a server that speaks the S3 protocol, of the package moto."""
    if find_spec("s3fs") is None or find_spec("moto") is None:
        pytest.skip("S3: s3fs or moto[server] is not installed")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_bucket(s3_server, monkeypatch):
    """The URL of an empty bucket; credentials are in the environment."""
    import fsspec

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-shown")
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # one without credentials
    bucket = f"bucket-{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}"


@pytest.fixture
def command(capsys):
    """Run a command in this process; return its exit status, output and errors.

    The first argument may have several words.
    """

    def command(first, *words):
        from trappm.cli import run

        capsys.readouterr()
        return run([*first.split(), *map(str, words)]), *capsys.readouterr()

    return command


@pytest.fixture
def printed(command):
    """Run a command that succeeds; return its output."""

    def printed(*words):
        status, out, err = command(*words)
        assert status == 0, err
        return out

    return printed


@pytest.fixture
def as_json(printed):
    """Run a command with --json; return what it prints."""
    return lambda *words: json.loads(printed(*words, "--json"))


@pytest.fixture
def refusal(command):
    """Run a command that is refused; return its error, which is one line."""

    def refusal(*words):
        status, out, err = command(*words)
        assert (status, out) == (2, ""), err
        (line,) = err.splitlines()
        return line

    return refusal


@pytest.fixture
def refused():
    """Return a context in which an error of one line with these words is raised."""

    @contextmanager
    def refused(words, error=InputError):
        with pytest.raises(error, match=words) as caught:
            yield caught
        assert "\n" not in str(caught.value)

    return refused


@pytest.fixture(scope="module")
def module_home(tmp_path_factory):
    """One data folder for the tests of a module, so that a model is traced once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("TRAPPM_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def traces_here():
    """Steps are traced in this process: starting Ray takes longer."""
    from trappm.cluster import pool_file, trace_tasks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_file, "ray_runtime", lambda address: nullcontext())
        patch.setattr(pool_file, "TraceTasks", lambda keys, **_: map(trace_tasks.trace_of, keys))
        yield


@pytest.fixture(autouse=True)
def as_before():
    """Preparing a CPU device sets a process's cores and threads: right for a child, not for us."""
    yield
    os.sched_setaffinity(0, _CORES)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
