"""`trappm labels`: every way of asking, and every way of asking wrongly."""

import csv
import io
import json
import re

import pandas as pd
import pytest
from store_samples import configuration, measurement

import trappm
from trappm.profiler.errors import InputError
from trappm.store import Home, Store


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "home"


def record(architecture="resnet18", batch_size=1, outcome="ok", *, step_ms=10.0, **fields):
    """Add a measurement to the store of the data folder."""
    if outcome == "ok":
        samples = (step_ms, step_ms + 0.5, step_ms + 0.25)
        fields = {"memory_mib": 321.123456789012, "step_samples_ms": samples, **fields}
    what = configuration(batch_size, architecture)
    with Store.open(Home.open().database_url) as store:
        store.measurements.record_many([measurement(what, outcome, step_ms=step_ms, **fields)])


@pytest.fixture
def filled(home):
    """A data folder with labels of two families, an attempt that failed, and odd names."""
    for batch_size in (1, 2, 4):
        for name in ("resnet18", "vgg11"):
            power = 50.0 if batch_size == 4 else None
            record(name, batch_size, step_ms=10.0 * batch_size, power_w=power)
    record("resnet18", 64, "oom")
    record("resnet18", 1, "error", message="[red]no\x1b[31m")
    return home


@pytest.fixture
def answer(command):
    """Run a command `trappm labels ...` that says nothing on standard error."""

    def answer(first, *arguments):
        status, out, err = command(f"labels {first}", *arguments)
        assert (status, err) == (0, "")
        return out

    return answer


@pytest.fixture
def rows_of(answer):
    return lambda first, *arguments: json.loads(answer(f"query --json {first}", *arguments))


def test_tables_show_no_control_characters(filled, answer):
    out = answer("query --outcome error")
    assert "[red]no" in out
    assert "\x1b" not in out


def test_query_filters_selects_sorts_and_limits(filled, answer, rows_of):
    rows = rows_of(
        "--architecture resnet* --sort -step_time_ms --columns batch_size,step_time_ms "
        "--metric memory_mib --protocol quick --since 1h --precision fp32"
    )
    assert rows == [{"batch_size": b, "step_time_ms": 10.0 * b} for b in (4, 2, 1)]
    assert rows_of("--columns batch_size --where", "step_time_ms > 15 and power_w < 60") == [
        {"batch_size": 4}, {"batch_size": 4},
    ]  # fmt: skip
    assert rows_of("--until 2025-12-31") == []
    assert [r["outcome"] for r in rows_of("--outcome oom")] == ["oom"]
    assert answer("query --outcome oom --until 2025-12-31") == "0 attempts\n"


def test_all_formats_contain_the_same_values(filled, answer, rows_of, tmp_path):
    whole = rows_of("--sort id")
    assert len(whole) == 6
    assert whole[0]["memory_mib"] == 321.123456789012
    assert whole[0]["power_w"] is None
    pd.Timestamp(whole[0]["created_at"])
    lines = answer("query --jsonl --sort id").splitlines()
    assert [json.loads(line) for line in lines] == whole
    table = csv.DictReader(io.StringIO(answer("query --csv --sort id")))
    expected = [{k: "" if v is None else str(v) for k, v in row.items()} for row in whole]
    assert list(table) == expected
    path = tmp_path / "labels.parquet"
    assert "6 rows written" in answer("query --sort id --parquet", path)
    frame = pd.read_parquet(path)
    assert frame.memory_mib.tolist() == [row["memory_mib"] for row in whole]
    assert str(frame.created_at.dtype).endswith("UTC]")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["labels.parquet"]


def test_sql_queries_are_answered_and_cannot_write(filled, command, answer, rows_of, refusal):
    assert rows_of("--sql", "SELECT count(*) AS n FROM labels") == [{"n": 6}]
    assert "resnet18" in answer("query --sql", "SELECT architecture FROM configurations")
    some = ("labels query --limit 2 --csv --sql", "SELECT id FROM labels ORDER BY 1")
    status, out, err = command(*some)
    assert (status, out.split()[1:]) == (0, ["1", "2"])
    assert err == "trappm: there is more than these 2; see --limit\n"
    assert "refused" in refusal("labels query --sql", "DELETE FROM labels")
    assert len(rows_of("")) == len(rows_of("--limit 6")) == 6


def test_show_prints_the_whole_label(filled, answer):
    assert "label 1: resnet18 batch 1 at 64 px" in answer("show 1")
    label = json.loads(answer("show 1 --json"))
    assert label["configuration"]["architecture"] == "resnet18"
    assert label["step_time_ms"] == 10.0
    assert label["measurement"]["step_samples_ms"] == [10.0, 10.5, 10.25]
    assert [a["outcome"] for a in label["attempts"]] == ["ok", "error"]


WRONG = [
    (["query", "--device", "cpu-2"], "did you mean 'cpu-2t'?"),
    (["query", "--since", "yesterday"], "'yesterday' is no time"),
    (["query", "--where", "speed > 3"], "cannot compare 'speed'; there is id, architecture"),
    (["query", "--parquet", "nowhere/x.parquet"], "no folder nowhere"),
    (["export", "a.csv", "--device", "cpu-3t"], "did you mean 'cpu-2t'"),
    (["query", "--sql", "SELECT 1", "--device", "x"], "--sql and --device exclude each other"),
    (["show", "99"], "no label has the id 99"),
    (["show", str(2**63)], "less than or equal to 9223372036854775807"),
]


def test_wrong_arguments_are_reported_in_one_line(filled, refusal):
    for arguments, reason in WRONG:
        assert reason in refusal("labels", *arguments), arguments


def test_a_missing_store_or_file_is_reported_and_creates_no_store(home, refusal, tmp_path):
    for arguments in (["query"], ["query", "--sql", "SELECT 1"], ["show", "1"]):
        assert re.search("no label store at .*TRAPPM_HOME", refusal("labels", *arguments))
    refusal("labels import", tmp_path / "none.csv")
    assert not home.exists()


def test_label_store_returns_labels_as_a_frame(filled):
    store = trappm.LabelStore()
    frame = store.labels(architecture="resnet*", sort="-batch_size", columns="batch_size,id")
    assert frame.batch_size.tolist() == [4, 2, 1]
    assert store.labels(where="batch_size >= 2", columns="id").shape == (4, 1)
    assert len(store.labels(outcome="any")) == 8
    with pytest.raises(InputError, match="did you mean 'vgg'"):
        store.labels(family="vggs")
    named = trappm.LabelStore(Home.open().database_url)
    pd.testing.assert_frame_equal(named.labels(), store.labels())
    with pytest.raises(InputError, match="no label store at"):
        trappm.LabelStore(f"sqlite:///{filled}/none.db").labels()
