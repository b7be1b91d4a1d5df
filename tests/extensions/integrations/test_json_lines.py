"""Files of records that are torn, foreign, shared and on a full disk."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trappm.extensions.integrations.json_lines import JsonLines
from trappm.profiler.errors import InputError
from trappm.profiler.records import Configuration, Measurement, Outcome, Protocol


def record(number, **environment):
    return Measurement(
        configuration=Configuration(architecture=f"m{number}", batch_size=1, input_size=64),
        device="cpu-1t",
        outcome=Outcome.OK,
        protocol=Protocol(name="test"),
        started_at="2026-11-21T12:00:00+00:00",
        duration_s=1.0,
        attempt_key=f"attempt {number}",
        memory_mib=100.0,
        environment=environment,
    )


def append(path, records):
    """Append the records that the file does not have yet."""
    with JsonLines(path) as lines:
        for each in records:
            if each not in lines.earlier:
                lines.append(each)


def lines_of(path):
    return [Measurement.from_dict(json.loads(line)) for line in path.read_bytes().splitlines()]


@given(cut=st.integers(0, 10_000))
def test_torn_line_is_cut_off_wherever_it_was_torn(tmp_path_factory, cut):
    path, records = tmp_path_factory.mktemp("torn") / "out", [record(n) for n in range(3)]
    append(path, records)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][: cut % len(lines[2])])
    append(path, records)
    assert lines_of(path) == records
    path.unlink()


@pytest.mark.parametrize("content", [b"not ours", b'{"configuration": 1}\n'])
def test_a_file_that_is_not_ours_is_left_alone(tmp_path, content):
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(InputError, match="line 1"):
        JsonLines(path)
    assert path.read_bytes() == content


def test_results_have_one_writer(tmp_path):
    with (
        JsonLines(tmp_path / "out"),
        pytest.raises(InputError, match="another process"),
    ):
        JsonLines(tmp_path / "out")
    JsonLines(tmp_path / "out").close()


WRITE = """
import resource, sys
sys.path[:0] = sys.argv[2].split(":")
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
from pathlib import Path
from test_json_lines import append, record

append(Path(sys.argv[1]), [record(n, padding="x" * 20_000) for n in range(100)])
"""


def test_file_limit_ends_with_one_error_and_loses_nothing(tmp_path):
    path = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(path), ":".join(sys.path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "File too large" in done.stderr.splitlines()[-1]
    kept = path.read_bytes()
    assert kept.endswith(b"\n")
    assert 0 < len(lines_of(path)) < 100
    append(path, records := [record(n, padding="x" * 20_000) for n in range(100)])
    assert path.read_bytes().startswith(kept)
    assert lines_of(path) == records
