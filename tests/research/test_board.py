"""The board: which rows are shown, what the page says of them, and that it stands alone."""

import re

import numpy as np
import pandas as pd
import pytest

from research import costbench, data
from research.__main__ import main
from research.board.rows import judged_rows
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


@pytest.fixture
def board(tmp_path, monkeypatch, capsys):
    """Write the board of two published sheets, of which one may be shown; return its text."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRAPPM_DATA", str(tmp_path))
    tools = [Tool("ours", ours), Tool("peer", published({"tensors, GiB": "peer"}))]
    sheets = {
        name: PublishedSheet(
            file, lambda _: TABLE, {"tensors, GiB": "gib"}, tools, card="card", model="name"
        )
        for name, file in (("open", "open.csv"), ("closed", "closed.csv"))
    }
    entries = {
        "open.csv": {"licence": "MIT", "source": "https://example.org/lab/steps"},
        "closed.csv": {"licence": "MIT, with exceptions", "source": "Another Lab"},
    }
    monkeypatch.setattr(costbench, "SHEETS", sheets)
    monkeypatch.setattr(data, "sheets", lambda: entries)
    monkeypatch.setattr("research.board.rows.SHEETS", ())

    def board():
        status = main(["board", "--to", str(tmp_path / "board.html")])
        assert status == 0, capsys.readouterr().err
        return (tmp_path / "board.html").read_text()

    return board


def cells(text, first):
    """Return the texts of the cells of the table row that begins with this text."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", text)
    plain = [
        [re.sub(r"<[^>]+>", "", c) for c in re.findall(r"<td[^>]*>(.*?)</td>", r)] for r in rows
    ]
    [row] = [row for row in plain if row[:1] == [first]]
    return row


def test_rows_are_shown_if_their_licence_says_so(board):
    text = board()
    assert cells(text, "A100 40 GB") == [
        "A100 40 GB", "tensors", "1", "10.0", "10.0", "100", "–", "peer 0.0 (10.0)", "lab/steps",
        "held out",
    ]  # fmt: skip
    assert cells(text, "V100 16 GB")[7] == "peer 50.0 (10.0)"
    assert cells(text, "open")[3:5] == ["2", "3"]
    assert "closed (licence: MIT, with exceptions)" in text
    assert "Another Lab" not in text
    assert text.count("<circle ") == 2
    assert "gpt2 on V100 16 GB: tensors 1,024 MiB measured, 1,126 predicted" in text


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
