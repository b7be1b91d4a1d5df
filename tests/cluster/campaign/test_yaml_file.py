"""YAML files of users: errors of one line."""

import os
from pathlib import Path

import pytest

from trappm.cluster.pool_file import PoolFile
from trappm.cluster.spec import MAX_FILE_BYTES, load_file, parse_text
from trappm.prediction.cost import prices_of
from trappm.profiler.errors import InputError


def test_pipes_devices_and_huge_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(
            InputError, match=f"pool file: cannot read {path}: it is not a plain file"
        ):
            load_file(path, PoolFile, kind="pool")
    with (tmp_path / "giant.yaml").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InputError, match="at most 1,048,576"):
        load_file(tmp_path / "giant.yaml", PoolFile, kind="pool")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(InputError, match="pool file"):
        load_file(tmp_path / "latin.yaml", PoolFile, kind="pool")


NINE = ["a0: &a0 {k: 1}"]
NINE += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 9)]
BOMB = "\n".join(NINE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{{name: {'9' * 5000}}}", "4300 digits"),
        ("{name: 2026-13-01}", "month must be in 1..12"),
        ("{name: 2026-01-01T99:00:00}", "hour must be in 0..23"),
        ("{name: a, name: b}", "duplicate key 'name'"),
        ("{[a]: b}", "unhashable"),
        (BOMB, "aliases"),
        ("{<<: {name: a}}", "merge keys"),
    ],
    ids=["digits", "month", "hour", "twice", "list", "bomb", "merge"],
)
def test_every_reader_of_yaml_reports_an_invalid_value_in_one_line(
    text, message, tmp_path, monkeypatch
):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    (tmp_path / "prices.yaml").write_text(text)
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    readers = (
        lambda: parse_text(text, PoolFile, origin="bad.yaml", kind="pool"),
        lambda: prices_of("rtx3090"),
    )
    for read in readers:
        with pytest.raises(InputError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)
