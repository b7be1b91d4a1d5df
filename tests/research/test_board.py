"""The board: which rows are shown, and that heads are judged on rows that they have not seen."""

import re

import numpy as np
import pandas as pd
import pytest

from research import data
from research.board.rows import LeftOut, judged_rows, published_rows
from research.costbench import PublishedSheet, Tool, published
from research.peers.cost_models import Figure
from research.snapshot import shipped_sheets
from trappm.profiler.errors import InputError

TABLE = pd.DataFrame(
    {"card": ["v100", "a100", "a100"], "name": ["gpt2", "gpt2", "opt-1b"], "gib": [1.0, 2.0, 4.0],
     "peer": [1.5, 2.0, 4.0]}
)  # fmt: skip


def ours(row):
    if row.gib == 4:
        raise InputError("too large")
    return {"tensors, GiB": Figure(1.1 * row.gib, 0.9 * row.gib, 1.2 * row.gib)}


@pytest.mark.parametrize(("licence", "is_shown"), [("MIT", True), ("MIT, with exceptions", False)])
def test_rows_are_shown_if_their_licence_says_so(monkeypatch, tmp_path, licence, is_shown):
    entry = {"licence": licence, "source": "https://example.org/lab/steps"}
    monkeypatch.setattr(data, "sheets", lambda: {"steps.csv": entry})
    monkeypatch.setenv("TRAPPM_DATA", str(tmp_path))
    tools = [Tool("ours", ours), Tool("peer", published({"tensors, GiB": "peer"}))]
    sheet = PublishedSheet(
        "steps.csv", lambda _: TABLE, {"tensors, GiB": "gib"}, tools, card="card", model="name"
    )
    made = published_rows("steps", sheet)
    if not is_shown:
        assert made == LeftOut("steps", f"licence: {licence}")
        return
    first, second = made.rows  # the third one has no prediction
    assert (first.card, second.card) == ("V100 16 GB", "A100 40 GB")
    assert (first.measured, first.peers) == (1024, {"peer": 1536})
    assert second.error == pytest.approx(10.0)


@pytest.mark.usefixtures("traces_here")
def test_label_sheets_show_held_out_rows_next_to_peers(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    wanted = ("cpu-2t", "memory_mib")
    cpu = next(sheet for sheet in shipped_sheets.SHEETS if (sheet.device, sheet.metric) == wanted)
    sheet = judged_rows("cpu", cpu, 24, 1)
    assert 0 < len(sheet.rows) <= 24 < sheet.total
    assert {row.card for row in sheet.rows} == {"cpu-2t"}
    assert int(re.search(r"from (\d+) labels", sheet.note)[1]) <= 24
    assert {*sheet.rows[0].peers} == {"physics alone", "XGBoost"}
    assert np.median([row.error for row in sheet.rows]) < 50
    assert 0 < sheet.spread < 20
