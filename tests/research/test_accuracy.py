"""The check of docs/research/accuracy.md ends with status 1 only if figures are worse."""

import pandas as pd
import pytest

from research.__main__ import main
from research.tables import accuracy


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 0),
        ({"mape": 0.09}, 0),
        ({"mape": 0.11}, 1),
        ({"mape": -1.0, "median_ape": -1.0}, 0),
        ({"coverage": 100.0}, 1),
    ],
)
def test_figure_above_tolerance_fails(monkeypatch, capsys, changes, status):
    def computed(what, sheet, processes):
        figures = accuracy.recorded().loc[[what]]
        return figures + pd.Series({name: changes.get(name, 0.0) for name in accuracy.FIGURES})

    monkeypatch.setattr(accuracy, "computed", computed)
    assert main(["tables", "--check"]) == status
    assert ("True" in capsys.readouterr().out) == bool(status)
