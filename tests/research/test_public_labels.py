"""Labels that users send in: what leaves their machine, and what comes in."""

import json

import pytest
from store_samples import configuration, measurement

from research.__main__ import main
from trappm.profiler.records import Provenance
from trappm.store import Home, LabelFilter, Store

PRIVATE = {
    "host": "secret-node", "kernel": "secret-kernel", "device_uuid": "GPU-secret",
    "utc": "2026-01-02T03:04:05+00:00", "pinned_cores": [11, 12],
    "code_version": "0.3.0+secretcommit", "a_later_fact": "secret-fact",
}  # fmt: skip
PUBLIC = {
    "device": "h100", "device_name": "NVIDIA H100", "torch": "2.11.0", "driver": "580.159",
    "step_time_relative_error": 0.01, "measuring_version": 2,
}  # fmt: skip
SWITCHES = {"LD_PRELOAD": "/home/secret/lib.so", "CUDA_MODULE_LOADING": "EAGER"}
BY = ("--source", "public", "--by", "Example Lab", "--licence", "Apache-2.0")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    return tmp_path


def record(*measurements):
    with Store.open(Home.open().database_url) as store:
        store.measurements.record_many(measurements)


def recorded():
    with Store.open(Home.open().database_url) as store:
        return list(store.measurements.each(LabelFilter()))


def label(architecture="resnet18", batch_size=4, outcome="ok", **fields):
    environment = PUBLIC | PRIVATE | {"switches": SWITCHES}
    given = {"message": "CUDA out of memory on secret-node"} if outcome != "ok" else {}
    what = configuration(batch_size, architecture)
    return measurement(
        what, outcome, device="h100", environment=environment,
        missing={"power_w": "no /sys/secret"}, **given, **fields,
    )  # fmt: skip


@pytest.fixture
def sent(home, printed):
    """A public file of three labels, from a store that has private ones, too."""
    record(
        label(),
        label(batch_size=8, outcome="oom", memory_detail_mib={"capacity": 81_559.0}),
        label("hf:gpt2-tiny,lora=8"),
        label("hf:secret/config.json"),
        label("secret_network"),
        label("resnet50.secret:network@1.2"),
        label("resnet34", provenance=Provenance.IMPORTED),
    )
    out = printed(f"labels export {home}/sent.jsonl --public")
    assert out.splitlines()[0].startswith("3 labels written to ")
    assert out.splitlines()[1].startswith("4 left out: ")
    return home / "sent.jsonl"


def test_a_public_file_tells_no_machine_and_no_person(sent):
    text = sent.read_text()
    assert "secret" not in text
    assert "2026" not in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["architecture"] for row in rows] == ["resnet18", "resnet18", "hf:gpt2-tiny,lora=8"]
    assert rows[0]["environment"] == PUBLIC | {"switches": {"CUDA_MODULE_LOADING": "EAGER"}}
    known = recorded()[0]
    for name in ("step_samples_ms", "memory_mib", "memory_detail_mib", "protocol"):
        assert rows[0][name] == json.loads(json.dumps(known.to_dict()[name]))


def test_a_public_file_is_imported_once_with_its_source(sent, monkeypatch, capsys):
    monkeypatch.setenv("TRAPPM_HOME", str(sent.parent / "ours"))
    assert main(["import", str(sent), *BY]) == 0
    assert "3 new attempts" in capsys.readouterr().out
    assert main(["import", str(sent), *BY]) == 0
    assert "0 new attempts" in capsys.readouterr().out
    first, *_ = labels = recorded()
    assert len(labels) == 3
    assert first.provenance is Provenance.IMPORTED
    assert first.environment["source"] == "Example Lab"
    assert first.environment["licence"] == "Apache-2.0"


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        (BY[:4], {}, "needs --licence"),
        (BY, {"message": "secret"}, "row 1: it is not as trappm labels export --public"),
        (BY, {"environment": PUBLIC | {"host": "secret-node"}}, "row 1: it is not as"),
    ],
)
def test_other_files_are_refused(sent, capsys, options, change, words):
    row = json.loads(sent.read_text().splitlines()[0]) | change
    sent.write_text(json.dumps(row) + "\n")
    before = len(recorded())
    capsys.readouterr()
    assert main(["import", str(sent), *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
    assert len(recorded()) == before
