"""Files made to do harm, wherever users give them: answered, or refused in one line.

The process that looks at unknown files works in the root folder here, where a path without a folder
in front would find the most.
"""

import json
import os
from collections import Counter
from itertools import islice

import pytest
from hostile_files import SECRET, hostile_files, tensors_at

from trappm.cli import run
from trappm.prediction.models import OutsideTracer, TracingProcess, file_tracer
from trappm.profiler.errors import ModelFileError, UnsupportedModelError
from trappm.profiler.records import Phase
from trappm.profiler.traced_step import TraceSettings

pytestmark = pytest.mark.extension("onnx")
EVERY = 17
"""Of the files, a sample stands for the others in the default run."""

GIVEN_AWAY = {"hunter2", "postgres"} | {
    str(int.from_bytes(SECRET[at : at + size], "little")) for size in (4, 8) for at in range(80)
}
"""The secret as text, and as numbers of any place in it."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model's own folder, with links out of it, and another's."""
    root = tmp_path_factory.mktemp("hostile")
    models, secrets = root / "models", root / "secrets"
    models.mkdir()
    secrets.mkdir()
    (secrets / "secret").write_bytes(SECRET)
    (models / "secret").write_bytes(SECRET)  # beside the model: it may be looked at, not told
    (models / "linked").symlink_to(secrets)
    (models / "link").symlink_to(secrets / "secret")
    return models, secrets


@pytest.fixture(scope="module")
def process():
    process = TracingProcess(timeout_s=60)
    process._server._folder = "/"
    yield process
    process.stop()


def outcome(process, path, content):
    path.write_bytes(content)
    try:
        tracer = OutsideTracer(process, file_tracer(str(path), None), path.name)
        made = tracer.trace(TraceSettings(), Phase.TRAIN, None, False)
    except (ModelFileError, UnsupportedModelError) as error:
        return type(error).__name__, str(error)
    return "answered", str(made.refusal)


def check_line(name, line):
    assert len(line.splitlines()) == 1, f"{name}: {line}"
    assert len(line) < 1000, name
    assert "unexpected" not in line, f"{name}: {line}"
    assert not any(secret in line for secret in GIVEN_AWAY), f"{name}: {line}"
    assert "bad_alloc" not in line, f"{name} was not weighed before it was made"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.slow)])
def test_hostile_files_are_answered_or_refused_in_one_line(folders, process, every):
    outcomes = Counter()
    for name, content in islice(hostile_files(folders[1]), 0, None, every):
        kind, reason = outcome(process, folders[0] / "x.onnx", content)
        outcomes[kind] += 1
        check_line(name, reason)
    assert outcomes["answered"]
    assert outcomes["ModelFileError"] > outcomes["UnsupportedModelError"] > 0


@pytest.mark.parametrize("where", ["secret", "passwd"])
def test_errors_do_not_reveal_files_of_the_server(folders, process, where):
    """With the root as its folder, "etc/passwd" is there and "etc/secret" is not."""
    assert os.path.exists("/etc/passwd")
    assert not os.path.exists("/etc/secret")
    for name, content in tensors_at(f"etc/{where}"):
        _, reply = outcome(process, folders[0] / "x.onnx", content)
        assert "should be stored" not in reply, f"{name}: {reply}"
        assert "regular file" not in reply, f"{name}: {reply}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_command_answers_or_refuses_hostile_files(folders, tmp_path, monkeypatch, capfd):
    """All that stands behind `main`, without starting Python five hundred times."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    path, statuses = folders[0] / "x.onnx", Counter()
    for name, content in hostile_files(folders[1]):
        path.write_bytes(content)
        status = run(["predict", str(path), "--device", "a100", "--json"])
        answer, line = capfd.readouterr()
        statuses[status] += 1
        assert status in {0, 1, 2}, f"{name}: {line}"
        if status == 0:
            json.loads(answer)
            assert "Traceback" not in line, f"{name}: {line}"
        else:
            assert not answer, name
            assert line.startswith("trappm: error: "), f"{name}: {line}"
            check_line(name, line)
    assert statuses[2] > statuses[1] > 0 < statuses[0]
