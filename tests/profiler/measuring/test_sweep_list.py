"""The lists that sweeps measure: what is read from them, and what is told of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trappm.profiler.errors import InputError
from trappm.profiler.measuring.sweep import read_configurations
from trappm.profiler.records import Configuration

ROOT = Path(__file__).parents[3]


def configuration(number: int) -> Configuration:
    return Configuration(architecture=f"model{number}", batch_size=1, input_size=64)


GROUP = {"architectures": ["test_resnet", "test_vi*"], "batch_sizes": [1, 2], "input_sizes": [64]}


def test_lists_are_read_from_lines_and_documents(tmp_path: Path) -> None:
    entries = [configuration(2).to_dict(), configuration(1).to_dict(), configuration(2).to_dict()]
    lines = tmp_path / "list.jsonl"
    lines.write_text("\n".join(map(json.dumps, entries)) + "\n\n", encoding="utf-8")
    document = tmp_path / "list.json"
    document.write_text(json.dumps(entries), encoding="utf-8")
    expected = [configuration(2), configuration(1)]
    assert read_configurations(lines) == read_configurations(document) == expected


def test_groups_are_those_of_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps({"groups": [GROUP]}), encoding="utf-8")
    actual = read_configurations(path)
    assert {c.architecture for c in actual} >= {"test_resnet", "test_vit"}
    assert {c.batch_size for c in actual} == {1, 2}
    path.write_text(json.dumps([configuration(9).to_dict(), GROUP]), encoding="utf-8")
    assert read_configurations(path) == [configuration(9), *actual]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no configurations"),
        ("[", "line 1 .* is not JSON"),
        ('{"architecture": "x"}', "batch_size is missing"),
        (
            '{"architecture": "x", "batch_size": 1, "input_size": 2, "sizes": 3}',
            "unknown key 'sizes'",
        ),
        ('{"architecture": "x", "batch_size": 0, "input_size": 2}', "batch_size is 0"),
        ('{"architecture": ["x"], "batch_size": 1, "input_size": 2}', "must be a name"),
        ('{"architectures": "x", "batch_sizes": [1], "input_sizes": [2]}', "lists of names"),
        ('{"architectures": [1], "batch_sizes": [1], "input_sizes": [2]}', "lists of names"),
        ('{"architectures": ["x"], "batch_sizes": [], "input_sizes": [2]}', "batch_sizes is empty"),
        ('{"batch_sizes": [1], "input_sizes": [2]}', "neither architectures nor families"),
        ("7", "neither a configuration"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_wrong_line_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_configurations(path)


@pytest.mark.parametrize(
    "text", ["a: b", "- [", "!!python/object/apply:os.system [ls]", "7", "[" * 5000, "\0"]
)
def test_wrong_document_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"list\.yaml"):
        read_configurations(path)
