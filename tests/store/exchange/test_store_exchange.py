"""Measurements to files and back, and files that are not what they should be."""

import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import configuration, contents, measurement

from trappm.profiler.errors import InputError
from trappm.profiler.records import Measurement, Provenance, StepSummary
from trappm.store import LabelFilter
from trappm.store.files import export_file, import_file, read_file

FORMATS = ("parquet", "jsonl")
ON_SQLITE = pytest.mark.parametrize("databases", ["sqlite"], indirect=True)

amounts = st.floats(min_value=1e-6, max_value=1e9)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)
measurements = st.builds(
    measurement,
    st.builds(
        configuration,
        st.integers(1, 4096),
        texts,
        st.integers(1, 1024),
        precision=st.sampled_from(["fp32", "amp-bf16"]),
        phase=st.sampled_from(["train", "infer"]),
        execution=st.sampled_from(["eager", "compile"]),
    ),
    st.sampled_from(["ok", "oom", "error"]),
    attempt_key=st.uuids().map(lambda key: key.hex),
    provenance=st.sampled_from(Provenance),
    step_samples_ms=st.lists(amounts, max_size=5).map(tuple),
    step=st.none()
    | st.builds(
        lambda median, more, **rest: StepSummary(
            median_ms=median, p95_ms=min(1e9, median + more), **rest
        ),
        amounts,
        amounts,
        mean_ms=amounts,
        iqr_ms=amounts,
        forward_share=st.none() | st.floats(0, 1),
    ),
    memory_mib=amounts,  # what is ok has some metric
    power_w=st.none() | amounts,
    memory_detail_mib=st.dictionaries(texts, st.floats(-1e9, 1e9)),
    missing=st.dictionaries(texts, texts),
    failed_in=st.none() | st.sampled_from(["create", '"', ""]),
    message=st.none() | texts | st.sampled_from(["", '""', "a,b\r\nc", "\r"]),
    environment=st.dictionaries(texts, st.none() | texts | st.integers(0, 9), min_size=1),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(many=st.lists(measurements, max_size=4), suffix=st.sampled_from(FORMATS))
def test_exported_measurements_are_read_unchanged(tmp_path, many, suffix):
    path = tmp_path / f"labels.{suffix}"
    many = [Measurement.from_dict(m.to_dict()) for m in many]
    assert export_file(many, path) == len(many)
    assert [verdict.measurement for verdict in read_file(path)] == many
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("suffix", FORMATS)
def test_importing_an_export_adds_nothing(store, database_url, tmp_path, suffix):
    bound = {"capacity": 80_000.0}
    store.measurements.record_many(
        [
            measurement(configuration(1)),
            measurement(configuration(2), "oom", memory_detail_mib=bound),
            measurement(configuration(4), "error"),
        ]
    )
    path = tmp_path / f"labels.{suffix}"
    assert export_file(store.measurements.each(LabelFilter()), path) == 2
    before = contents(database_url)
    report = import_file(store.measurements.record_many, path)
    assert (report.rows, report.new) == (2, 0)
    assert report.counts == {"label": 1, "censored": 1}
    assert contents(database_url) == before
    assert export_file(store.measurements.each(LabelFilter(outcome="any")), path) == 3


def lines(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


NO_METRIC = (
    "step_median_ms", "step_mean_ms", "step_iqr_ms", "step_p95_ms", "memory_mib", "power_w",
)  # fmt: skip


def row(tmp_path, **changes):
    path = tmp_path / "one.jsonl"
    export_file([measurement()], path)
    return json.loads(path.read_text()) | changes


@pytest.mark.parametrize(
    ("changes", "provenance"),
    [
        ({}, "measured"),
        ({"fingerprint": "0" * 16}, "imported"),
        ({"environment": {}}, "imported"),
        ({"provenance": "simulated", "environment": {}}, "simulated"),
    ],
)
def test_measured_rows_need_the_fingerprint_of_their_environment(tmp_path, changes, provenance):
    (verdict,) = read_file(lines(tmp_path, row(tmp_path, **changes)))
    assert verdict.measurement.provenance == provenance


def nested(levels):
    return {"a": nested(levels - 1)} if levels else 1


def test_profiler_records_can_be_imported(tmp_path):
    ours = measurement(environment={"device": "cpu-2t", "measuring_version": 1})
    other = measurement(environment={"device": "cpu-2t"})
    records = [v.measurement for v in read_file(lines(tmp_path, ours.to_dict(), other.to_dict()))]
    assert records == [ours, dataclasses.replace(other, provenance="imported")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_mib": -1}, "memory_mib is -1"),
        ({"step_median_ms": None}, "step_median_ms is missing"),
        ({"architecture": "a" * 201}, "at most 200 characters"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"started_at": "2026-01-01T00:00:00"}, "with a zone"),
        ({"step_samples_ms": [1e39, 10.0]}, "finite as a float32"),
        (dict.fromkeys(NO_METRIC), "neither step time nor memory nor power"),
        ({"message": "half a pair: \ud800"}, "message has a value .* surrogates"),
        ({"environment": nested(40)}, "more than 32 nested levels"),
        ({"environment": {"host": "LARGE"}}, "environment has a value .*not JSON compliant"),
        ({"surprise": 1}, "no column 'surprise'"),
        ({"memory_mib": 1e308}, r"memory_mib is 1e\+308; .* less than or equal to 1000000000"),
    ],
)
@ON_SQLITE
def test_one_invalid_row_refuses_the_whole_file(store, tmp_path, refused, changes, message):
    good = row(tmp_path)
    path = lines(tmp_path, good | {"attempt_key": "other"}, good | changes)
    path.write_text(path.read_text().replace('"LARGE"', "1e999"))
    with refused(f"^rows.jsonl, row 2: .*{message}"):
        import_file(store.measurements.record_many, path)
    assert store.labels.find() == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 but not really PAR1", ""),
        ("a.jsonl", b"{\n", ""),
        ("a.jsonl", b"[" * 100_000 + b"\n", ""),
        ("a.jsonl", b'{"message": "' + b"x" * (9 << 20), "longer than 8 MiB"),
        ("gone.jsonl", None, ""),
    ],
    ids=range(5),
)
@ON_SQLITE
def test_invalid_files_are_refused_in_one_line(store, tmp_path, refused, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with refused(f"{name}.*{message}"):
        import_file(store.measurements.record_many, path)
    assert store.labels.find() == []


@ON_SQLITE
def test_parquet_files_that_unpack_to_gigabytes_are_refused(store, tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"message": pa.array(["x" * 300_000] * 500)})
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 100_000
    with pytest.raises(InputError, match="500 of its rows take more than 128 MiB"):
        import_file(store.measurements.record_many, path)
    shared = pa.array(["x" * 300_000] * 500).dictionary_encode()
    pq.write_table(pa.table({"message": shared}), path, compression="zstd")
    with pytest.raises(InputError, match="columns message are dictionaries"):
        import_file(store.measurements.record_many, path)
