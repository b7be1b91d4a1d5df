"""Properties of operators: `operators.csv` of ONNX, `aten.csv` of PyTorch.

The comments in the files explain the columns.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class OnnxRow(NamedTuple):
    """Properties of one operator of ONNX."""

    operator: str
    is_feature: bool
    kind: str
    passes: int
    is_commutative: bool
    attributes: tuple[str, ...] | None
    """None: all of them."""


class AtenRow(NamedTuple):
    """Properties of one operator of PyTorch."""

    operator: str
    rule: str
    kernel: str


def _rows(name: str) -> Iterator[dict[str, str]]:
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


ONNX: Mapping[str, OnnxRow] = {
    row["operator"]: OnnxRow(
        operator=row["operator"],
        is_feature=row["feature"] == "yes",
        kind=row["class"],
        passes=int(row["passes"]),
        is_commutative=row["commutative"] == "yes",
        attributes=None if row["attributes"] == "all" else tuple(row["attributes"].split()),
    )
    for row in _rows("operators.csv")
}
ATEN: Mapping[str, AtenRow] = {row["operator"]: AtenRow(**row) for row in _rows("aten.csv")}


def operators_of(*kinds: str) -> frozenset[str]:
    """Return the ONNX operators of these classes."""
    return frozenset(row.operator for row in ONNX.values() if row.kind in kinds)
