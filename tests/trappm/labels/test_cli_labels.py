"""`trappm labels`: every way of asking, and every way of asking wrongly."""

import csv
import io
import json
import re
from functools import partial

import pandas as pd
import pytest
from label_samples import DEVICE, measurement
from store_whole import kernel

import trappm
from trappm.profiler.errors import InputError
from trappm.store import Home, Store
from trappm.store.kernel_measurements import export_kernels
from trappm.terminal.label_tables import print_labels


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "home"


@pytest.fixture
def filled(home):
    """A data folder with labels of two families, an attempt that failed, and odd names."""
    with Store.open(Home.open().database_url) as store:
        for batch_size in (1, 2, 4):
            for name in ("resnet18", "vgg11"):
                power = 50.0 if batch_size == 4 else None
                store.measurements.record(
                    measurement(name, batch_size, step_ms=10.0 * batch_size, power_w=power)
                )
        store.measurements.record(measurement("resnet18", 64, "oom"))
        store.measurements.record(measurement("resnet18", 1, "error", message="[red]no\x1b[31m"))
    return home


@pytest.fixture
def ask(command):
    """Return exit status, output and errors of `trappm labels ...`."""
    return partial(command, "labels")


def answer(ask, *arguments):
    status, out, err = ask(*arguments)
    assert (status, err) == (0, ""), err
    return out


def rows_of(ask, *arguments):
    return json.loads(answer(ask, "query", "--json", *arguments))


# Query.


def test_values_shared_by_all_rows_are_listed_once(filled, ask):
    out = answer(ask, "query", "--family", "resnet")
    assert out.startswith("3 labels")
    assert out.count("resnet18") == 3
    assert "protocol quick" in out
    assert "vgg11" not in out


def test_empty_metrics_have_no_column(filled, ask):
    assert "power w" in answer(ask, "query", "--family", "resnet")
    out = answer(ask, "query", "--batch-size", "1")
    assert "power w" not in out
    assert "no power_w" in out


def test_unknown_times_and_logged_memory_are_shown_as_such(home, ask):
    with Store.open(Home.open().database_url) as store:
        store.measurements.record(
            measurement(
                started_at="1970-01-01T00:00:00+00:00", memory_detail_mib={"logged": 21657.0}
            )
        )
    out = answer(ask, "show", "1")
    assert "1970" not in out
    assert "logged 21,657" in out


def test_an_export_for_an_unknown_device_writes_nothing(filled, ask, tmp_path):
    status, out, err = ask("export", tmp_path / "a.csv", "--device", "cpu-3t")
    assert (status, out) == (2, "")
    assert "did you mean 'cpu-2t'" in err
    assert not (tmp_path / "a.csv").exists()


def test_a_missing_import_file_creates_no_store(home, ask, tmp_path):
    status, out, err = ask("import", tmp_path / "none.csv")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert not home.exists()


def test_query_filters_selects_sorts_and_limits(filled, ask):
    rows = rows_of(
        ask, "--architecture", "resnet*", "--sort", "-step_time_ms", "--columns",
        "batch_size,step_time_ms", "--metric", "memory_mib", "--protocol", "quick",
        "--since", "1h", "--precision", "fp32",
    )  # fmt: skip
    assert rows == [
        {"batch_size": 4, "step_time_ms": 40.0},
        {"batch_size": 2, "step_time_ms": 20.0},
        {"batch_size": 1, "step_time_ms": 10.0},
    ]
    assert rows_of(ask, "--until", "2025-12-31") == []
    assert [r["outcome"] for r in rows_of(ask, "--outcome", "oom")] == ["oom"]
    assert answer(ask, "query", "--outcome", "oom", "--until", "2025-12-31") == "0 attempts\n"


def test_failure_reasons_are_shown_below_the_table(filled, ask, monkeypatch):
    why = "noise: the interquartile range is 98% of a step; contention: others had its cores"
    with Store.open(Home.open().database_url) as store:
        store.measurements.record(measurement("vgg11", 8, "unstable", message=why))
    monkeypatch.setenv("COLUMNS", "80")
    out = answer(ask, "query", "--outcome", "unstable")
    table, _, below = out.partition("vgg11")
    assert "message" not in table
    assert f": {why}" in " ".join(below.split())
    assert "interquartile" in out


def test_statistics_by_group(filled, ask):
    rows = rows_of(
        ask, "--by", "family,device", "--agg", "count,p95", "--columns", "step_time_ms,power_w"
    )
    assert rows == [
        {"family": family, "device": DEVICE, "step_time_ms_count": 3, "step_time_ms_p95": 38.0,
         "power_w_count": 1, "power_w_p95": 50.0}
        for family in ("resnet", "vgg")
    ]  # fmt: skip
    (whole,) = rows_of(ask, "--agg", "median,max", "--columns", "step_time_ms")
    assert whole == {"step_time_ms_median": 20.0, "step_time_ms_max": 40.0}
    assert "36" in answer(ask, "query", "--by", "family", "--agg", "p90")
    largest = rows_of(ask, "--outcome", "any", "--by", "outcome", "--sort", "-duration_s_count",
                      "--columns", "duration_s")  # fmt: skip
    assert (largest[0]["outcome"], largest[0]["duration_s_count"]) == ("ok", 6)


def test_statistics_report_censored_labels(filled, ask):
    with Store.open(Home.open().database_url) as store:
        bound = {"capacity": 9.0}
        store.measurements.record(measurement("vgg11", 99, "oom", memory_detail_mib=bound))
    status, out, err = ask("query", "--by", "family", "--agg", "count", "--json")
    counts = {row["family"]: row["memory_mib_count"] for row in json.loads(out)}
    assert (status, counts) == (0, {"resnet": 3, "vgg": 3})
    assert "1 labels are censored" in err


def test_all_formats_contain_the_same_values(filled, ask, tmp_path):
    whole = rows_of(ask, "--sort", "id")
    assert len(whole) == 6
    assert whole[0]["memory_mib"] == 321.123456789012
    assert whole[0]["power_w"] is None
    pd.Timestamp(whole[0]["created_at"])
    lines = answer(ask, "query", "--jsonl", "--sort", "id").splitlines()
    assert [json.loads(line) for line in lines] == whole
    table = list(csv.DictReader(io.StringIO(answer(ask, "query", "--csv", "--sort", "id"))))
    for row, expected in zip(table, whole, strict=True):
        assert row == {k: "" if v is None else str(v) for k, v in expected.items()}
    path = tmp_path / "labels.parquet"
    assert "6 rows written" in answer(ask, "query", "--parquet", path, "--sort", "id")
    frame = pd.read_parquet(path)
    assert frame.memory_mib.tolist() == [row["memory_mib"] for row in whole]
    assert str(frame.created_at.dtype).endswith("UTC]")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["labels.parquet"]


def test_control_characters_are_not_printed(filled, ask):
    out = answer(ask, "query", "--outcome", "error")
    assert "[red]no" in out
    assert "\x1b" not in out


def test_sql_queries_are_answered_and_cannot_write(filled, ask):
    assert rows_of(ask, "--sql", "SELECT count(*) AS n FROM labels") == [{"n": 6}]
    assert "resnet18" in answer(ask, "query", "--sql", "SELECT architecture FROM configurations")
    status, out, err = ask("query", "--sql", "SELECT id FROM labels ORDER BY 1", "--limit", 2)
    assert status == 0
    assert out.split()[-2:] == ["1", "2"]
    assert "there is more than these 2" in err
    status, out, err = ask("query", "--sql", "DELETE FROM labels")
    assert (status, out) == (2, "")
    assert "refused" in err
    assert len(rows_of(ask)) == 6


@pytest.mark.parametrize(
    ("architectures", "header"),
    [
        (["resnet18", "vit_tiny_patch16_224"], "input size device"),
        (["hf:gpt2-tiny", "hf:t5-tiny,lora=4"], "tokens device"),
        (["hf:vit-tiny", "resnet18"], "px device"),
        (["hf:gpt2-tiny", "resnet18"], "tokens px device"),
    ],
)
def test_sizes_have_a_column_per_unit(capsys, monkeypatch, architectures, header):
    monkeypatch.setenv("COLUMNS", "160")
    rows = [{"id": 1, "architecture": name, "batch_size": 2, "input_size": 64, "device": DEVICE}
            for name in architectures]  # fmt: skip
    print_labels(pd.DataFrame(rows))
    shown = " ".join(capsys.readouterr().out.split())
    assert header in shown
    assert shown.count(" 64 ") == len(architectures)


# Show.


def test_show_prints_the_whole_label(filled, ask):
    out = answer(ask, "show", "1")
    for words in ("label 1: resnet18 batch 1 at 64 px", "321.1", "MiB", "no meter", "IQR 0.5",
                  "2 attempts", "error", "torch", "2.13.0", "step time in ms", "┤"):  # fmt: skip
        assert words in out, words
    label = json.loads(answer(ask, "show", "1", "--json"))
    assert label["configuration"]["architecture"] == "resnet18"
    assert label["step_time_ms"] == 10.0
    assert label["measurement"]["step_samples_ms"] == [10.0, 10.5, 10.25]
    assert [a["outcome"] for a in label["attempts"]] == ["ok", "error"]


# Wrong questions.


WRONG = [
    (["query", "--device", "cpu-2"], "did you mean 'cpu-2t'?"),
    (["query", "--since", "yesterday"], "'yesterday' is no time"),
    (["query", "--by", "prize"], "cannot group by 'prize'"),
    (["query", "--by", "family,family"], "cannot group by 'family' twice"),
    (["query", "--by", "step_time_ms"], "cannot group by 'step_time_ms'"),
    (["query", "--agg", "mode"], "no statistic 'mode'"),
    (["query", "--agg", "p100"], "p1 to p99"),
    (["query", "--agg", "count", "--columns", "family"], "cannot summarize 'family'"),
    (["query", "--by", "family", "--sort", "step_time_ms_max"], "there is family, step_time_ms_co"),
    (["query", "--json", "--csv"], "--json and --csv exclude each other"),
    (["query", "--parquet", "nowhere/x.parquet"], "no folder nowhere"),
    (["query", "--limit", "9" * 30], "--limit"),
    (["query", "--sql", "SELECT 1", "--device", "x"], "--sql and --device exclude each other"),
    (["show", "99"], "no label has the id 99"),
    (["show", "one"], "ID"),
    (["show"], "ID"),
    (["show", str(2**63)], "less than or equal to 9223372036854775807"),
]


def test_wrong_arguments_are_reported_in_one_line(filled, ask):
    for arguments, reason in WRONG:
        status, out, err = ask(*arguments)
        assert (status, out) == (2, ""), (arguments, err)
        assert reason in err, arguments
        assert len(err.splitlines()) == 1, arguments


@pytest.mark.parametrize(
    "arguments",
    [["query"], ["query", "--by", "family"], ["query", "--sql", "SELECT 1"], ["show", "1"]],
    ids=" ".join,
)
def test_a_missing_store_is_reported_and_not_created(home, ask, arguments):
    status, out, err = ask(*arguments)
    assert (status, out) == (2, "")
    assert "no label store at" in err
    assert "TRAPPM_HOME" in err
    assert len(err.splitlines()) == 1
    assert not home.exists()


def test_importing_an_export_adds_nothing(filled, ask, tmp_path):
    file = tmp_path / "all.jsonl"
    answer(ask, "export", file, "--outcome", "any")
    printed = answer(ask, "import", file)
    assert "8 rows, 0 new attempts" in printed
    assert re.search(r"label +6 +measured", printed)


# Kernels.


def test_kernels_are_imported_once_and_exported_unchanged(home, ask, tmp_path):
    file, again = tmp_path / "kernels.jsonl", tmp_path / "again.jsonl"
    export_kernels([kernel(time_ms=1.0), kernel("error", message="it failed")], file)
    printed = answer(ask, "import", file, "--kernels")
    assert printed == "kernels.jsonl: 2 kernels, 2 of them new\n"
    facts = json.loads(answer(ask, "import", file, "--kernels", "--json"))
    assert facts == {"file": str(file), "rows": 2, "new": 0}
    answer(ask, "export", again, "--kernels", "--device", kernel().device)
    assert again.read_text() == file.read_text()
    answer(ask, "export", again, "--kernels")
    assert again.read_text() == file.read_text()


def test_wrong_kernel_arguments_are_reported_in_one_line(home, ask, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{json.dumps(kernel(time_ms=1.0).to_dict())}\nnonsense\n")
    status, out, err = ask("import", bad, "--kernels")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "line 2" in err
    assert not home.exists()
    Store.open(Home.open().database_url).close()
    for more, reason in (
        (["--device", "v9000"], "no kernels of 'v9000'"),
        (["--family", "resnet"], "--kernels and --family exclude each other"),
    ):
        status, out, err = ask("export", tmp_path / "none.jsonl", "--kernels", *more)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert reason in err
    assert not (tmp_path / "none.jsonl").exists()


# From Python.


def test_label_store_returns_labels_as_a_frame(filled):
    store = trappm.LabelStore()
    frame = store.labels(architecture="resnet*", sort="-batch_size", columns="batch_size")
    assert frame.batch_size.tolist() == [4, 2, 1]
    assert len(store.labels(outcome="any")) == 8
    with pytest.raises(InputError, match="did you mean 'vgg'"):
        store.labels(family="vggs")
    with pytest.raises(InputError, match="limit is -1"):
        store.labels(limit=-1)
    named = trappm.LabelStore(Home.open().database_url)
    pd.testing.assert_frame_equal(named.labels(), store.labels())
    with pytest.raises(InputError, match="no label store at"):
        trappm.LabelStore(f"sqlite:///{filled}/none.db").labels()
