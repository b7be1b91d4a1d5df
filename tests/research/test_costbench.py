"""Comparison of published predictors: coverage, errors on common rows, and what is refused."""

import math

import numpy as np
import pandas as pd
import pytest

from research.costbench import (
    PublishedSheet,
    Tool,
    line_error,
    outcomes,
    published,
    summary,
)
from research.peers.cost_models import Figure
from trappm.profiler.errors import InputError

ROWS = pd.DataFrame({"ms": [100.0, 200.0, math.nan, 400.0], "peer": [110.0, math.nan, 1.0, 600.0]})


def ours(row):
    if row.ms == 400:
        raise InputError("too large")
    return {"time": Figure(1.2 * row.ms, 0.9 * row.ms, 1.3 * row.ms)}


def compared(*tools):
    sheet = PublishedSheet("", lambda _: ROWS, {"time": "ms"}, tools, card="a100", model="peer")
    return summary(outcomes(sheet, ROWS)).set_index("tool")


def test_errors_are_of_predicted_and_of_common_rows():
    table = compared(Tool("ours", ours), Tool("peer", published({"time": "peer"})))
    assert table.predicted.to_dict() == {"ours": "2 of 3", "peer": "2 of 3"}
    assert table["mean %"].round(6).to_dict() == {"ours": 20, "peer": 30}
    assert table["common %"].round(6).to_dict() == {"ours": 20, "peer": 10}
    assert table["common rows"].to_dict() == {"ours": 1, "peer": 1}
    assert table["inside %"]["ours"] == 100
    assert math.isnan(table["inside %"]["peer"])
    assert table["first failure"].to_dict() == {"ours": "too large", "peer": "no prediction"}


def test_a_missing_constant_costs_nothing_after_a_line():
    predicted = np.arange(1.0, 11.0)
    assert line_error(predicted, 3 * predicted + 7) == pytest.approx(0, abs=1e-6)
    assert math.isnan(line_error(predicted[:4], predicted[:4]))
