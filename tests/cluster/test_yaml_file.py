"""Files that users write: what is told of a faulty one, in one line."""

import os
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from trappm.cluster.pool import parse_pool_file
from trappm.cluster.yaml_file import MAX_FILE_BYTES, parse, read_text
from trappm.profiler.errors import InputError

GROUP = "architectures: [resnet18], batch_sizes: [1], input_sizes: [32]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{{nam: a, groups: [{{{GROUP}}}]}}", "nam: unknown key; did you mean 'name'?"),
        (
            f"{{name: a, groups: [{{{GROUP.replace('sizes', 'size', 1)}}}]}}",
            "groups.0.batch_size: unknown key; did you mean 'batch_sizes'?",
        ),
        (
            f"{{name: a, groups: [{{{GROUP}, precision: [fp32]}}]}}",
            "groups.0.precision: unknown key; did you mean 'precisions'?",
        ),
        ("{nam: a}", "nam: unknown key; did you mean 'name'? (and 1 more)"),
        (
            f"{{name: a, zzzzz: 1, qqqqq: 2, groups: [{{{GROUP}}}]}}",
            "zzzzz: unknown key (and 1 more)",
        ),
    ],
)
def test_a_misspelt_key_explains_the_one_that_is_missing(text, told):
    with pytest.raises(InputError) as caught:
        parse_pool_file(text, origin="my.yaml")
    assert str(caught.value) == f"my.yaml: {told}"


class Two(BaseModel):
    model_config = ConfigDict(extra="forbid")
    weight: int
    height: int


def test_another_key_that_is_missing_still_counts():
    with pytest.raises(InputError, match=r"did you mean 'weight'\? \(and 1 more\)$"):
        parse("{weigth: 1}", Two, origin="f", kind="test", parts=(Two,))


def test_a_pipe_a_device_and_a_giant_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(InputError, match=f"pool file: cannot read {path}: it is no plain file"):
            read_text(path, kind="pool")
    with (tmp_path / "giant.yaml").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InputError, match="at most 1,048,576"):
        read_text(tmp_path / "giant.yaml", kind="pool")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(InputError, match="pool file"):
        read_text(tmp_path / "latin.yaml", kind="pool")
