"""Properties of ONNX operators: `operators.csv`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).with_name("operators.csv")


class OperatorRow(NamedTuple):
    """Properties of one operator; the comment of the file explains the columns."""

    operator: str
    is_feature: bool
    kind: str
    passes: int
    is_commutative: bool
    attributes: tuple[str, ...] | None
    """None: all of them."""


def _read() -> dict[str, OperatorRow]:
    with _FILE.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {
            row["operator"]: OperatorRow(
                operator=row["operator"],
                is_feature=row["feature"] == "yes",
                kind=row["class"],
                passes=int(row["passes"]),
                is_commutative=row["commutative"] == "yes",
                attributes=None if row["attributes"] == "all" else tuple(row["attributes"].split()),
            )
            for row in rows
        }


TABLE: Mapping[str, OperatorRow] = _read()


def operators_of(*kinds: str) -> frozenset[str]:
    """Return the operators of these classes."""
    return frozenset(row.operator for row in TABLE.values() if row.kind in kinds)
