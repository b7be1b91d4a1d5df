"""The board: which rows are shown, what the page says of them, and that it stands alone."""

import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from store_samples import configuration, measurement

import trappm
from research import costbench, data
from research.__main__ import main
from research.board.page import page
from research.board.rows import BoardRow, BoardSheet, LeftOut, judged_rows
from research.costbench import PublishedSheet, Tool, published
from research.peers.cost_models import Figure
from research.snapshot import shipped_sheets
from trappm.profiler.errors import InputError
from trappm.store import Home, Store

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

    def board(*options):
        status = main(["board", "--to", str(tmp_path / "board.html"), *options])
        out, err = capsys.readouterr()
        if status:
            return status, out, err
        return (tmp_path / "board.html").read_text(), out, err

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
    text, out, err = board()
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
    assert "board.html: 0.0" in out
    assert [line.split(":")[0] for line in err.splitlines()] == ["1/2 open", "2/2 closed"]
    assert "s left" in err


def test_sent_in_labels_are_shown_with_their_source(board, printed, tmp_path, monkeypatch):
    label = measurement(
        configuration(4, "test_resnet"), device="a100-40gb", step_ms=7.0, memory_mib=900.0,
        environment={"device": "a100-40gb", "torch": "2.11", "measuring_version": 2},
    )  # fmt: skip
    with Store.open(Home.open().database_url) as store:
        store.measurements.record_many([label])
    printed(f"labels export {tmp_path}/sent.jsonl --public")
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "ours"))
    for licence, source in (("MIT", "Example Lab"), ("not stated", "Closed Lab")):
        options = ("--source", "public", "--by", source, "--licence", licence)
        assert main(["import", f"{tmp_path}/sent.jsonl", *options]) == 0
    text, *_ = board("--only", "Example Lab, a100-40gb")
    step = trappm.predict("test_resnet", batch_size=4, input_size=64, device="a100")
    assert f"training step 7 ms measured, {step.step_time_ms:.3g} predicted (Example Lab)" in text
    assert "training memory 900 MiB measured" in text
    assert "Closed Lab" not in text


@pytest.mark.usefixtures("traces_here")
def test_label_sheets_show_held_out_rows_next_to_peers(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    wanted = ("cpu-2t", "memory_mib")
    cpu = next(sheet for sheet in shipped_sheets.SHEETS if (sheet.device, sheet.metric) == wanted)
    sheet = judged_rows("cpu", cpu, 48, 1)
    assert 0 < len(sheet.rows) <= 48 < sheet.total
    assert {row.card for row in sheet.rows} == {"cpu-2t"}
    assert int(re.search(r"from (\d+) labels", sheet.note)[1]) <= 48
    assert sheet.licence == "as this project"
    assert [source[:11] for source in sheet.sources] == ["trappm, AMD", "trappm, Int"]
    assert {*sheet.rows[0].peers} == {"physics alone", "XGBoost"}
    assert np.median([row.error for row in sheet.rows]) < 50
    assert 0 < sheet.spread < 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--only", "opne"), "did you mean 'open'?"),
        (("--only", "closed"), "no row may be shown"),
        (("--to", "/no/such/folder/board.html"), "there is no folder /no/such/folder"),
    ],
)
def test_wrong_options_are_one_line(board, options, words):
    status, out, err = board(*options)
    assert (status, out) == (2, "")
    assert words in err.splitlines()[-1]


class Addresses(HTMLParser):
    """Addresses that a browser loads by itself."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    def handle_starttag(self, tag, attributes):
        self.loaded += [v for name, v in attributes if name == "src" or tag == "link"]


def test_a_page_of_many_rows_stands_alone_and_is_small():
    generator = np.random.default_rng(0)
    names = ["<script>alert(1)</script>", "resnet", "vit"]
    rows = [
        BoardRow(
            card=f"Card {n % 9}", kind=names[n % 3], model=f"{names[n % 3]}_{n}", quantity="step",
            unit="ms", measured=float(value), predicted=1.2 * float(value),
        )
        for n, value in enumerate(generator.lognormal(3, 2, 4000))
    ]  # fmt: skip
    sheet = BoardSheet(title="a", sources=["b"], licence="MIT", total=5000, rows=rows, spread=2.5)
    text = page([sheet], [LeftOut("c", "licence: unknown")], "made today")
    parser = Addresses()
    parser.feed(text)
    assert parser.loaded == []
    assert "alert(1)</script>" not in text
    assert len(text.encode()) < 2 << 20
    assert cells(text, "Card 0")[3:7] == ["20.0", "20.0", "–", "2.5"]


def test_a_page_of_one_row_without_held_out_ones():
    row = BoardRow(
        card="a", kind="vit", model="vit", quantity="step", unit="ms", measured=10.0, predicted=10.0
    )
    sheet = BoardSheet(title="a", sources=["b"], licence="MIT", total=1, rows=[row], fitted="all")
    text = page([sheet], [], "made today")
    assert "The page has 1 public rows" in text
    assert "held out, half" not in text
