"""`python -m research evaluate`: files of labels, splits and errors."""

import csv
import json
from dataclasses import replace

import pytest

from research.__main__ import main as run
from research.evaluation.label_files import read_labels
from research.evaluation.workbench import Workbench
from research.peers.graph_networks import SIZES
from trappm.cluster.trace_tasks import trace_of
from trappm.learner.paper.presets import LAPTOP, PRESETS
from trappm.profiler.models.zoo import native_input_size
from trappm.profiler.traced_step import TraceFolder, TraceKey
from trappm.store import Home

ARCHITECTURES = [
    "test_resnet", "test_vit", "test_efficientnet", "test_convnext", "test_vit2", "resnet10t",
]  # fmt: skip
"""timm's tiny models, and a small one."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A data folder with all traces but one, which the first test that needs it makes."""
    folder = tmp_path_factory.mktemp("home")
    cache = TraceFolder(Home(folder).traces)
    for name in ARCHITECTURES[1:]:
        trace_of(TraceKey(name, native_input_size(name))).keep(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAPPM_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Networks that hardly learn: how well they do is told elsewhere."""
    encoder, head = replace(LAPTOP.encoder, steps=20), replace(LAPTOP.head, steps=20)
    size = replace(SIZES["laptop"], training=replace(SIZES["laptop"].training, steps=20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "laptop", replace(LAPTOP, encoder=encoder, head=head))
        patch.setitem(SIZES, "laptop", size)
        yield


@pytest.fixture
def say(home, capsys, traces_here):
    def types(*arguments):
        capsys.readouterr()
        status = run(["evaluate", *map(str, arguments)])
        return status, *capsys.readouterr()

    return types


@pytest.fixture
def report(say):
    """The report of an evaluation as JSON."""

    def report(*arguments):
        status, out, err = say(*arguments, "--json")
        assert status == 0, err
        return json.loads(out)

    return report


def write_sheet(path, architectures, cost=lambda name, batch: 1800 + 900 * batch):
    """GPUMemNet's columns, with memory that a line over FakeTensor's estimate explains."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("architecture", "batch_size", "max_gpu_memory_mib", "faketensor_mib"))
        for name in architectures:
            for batch in (8, 16, 32):
                memory = cost(name, batch)
                writer.writerow((name, batch, memory, (memory - 1700) / 1.25))
    return path


@pytest.fixture(scope="module")
def sheets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sheets")
    return (
        write_sheet(folder / "train.csv", ARCHITECTURES[:4]),
        write_sheet(folder / "test.csv", ARCHITECTURES[4:]),
        write_sheet(folder / "all.csv", ARCHITECTURES),
    )


def test_train_and_test_files(report, sheets):
    found = report(
        "--train", sheets[0], "--test", sheets[1], "--metric", "memory",
        "--estimator", "faketensor", "--estimator", "xgboost", "--estimator", "ours",
    )  # fmt: skip
    assert found["device"] == "a100-40gb"
    assert found["train"]["count"] == 12
    assert found["test"]["architectures_in_training"] == 0
    line, boosting, ours = found["results"]
    assert line["estimator"] == "faketensor"
    assert line["accuracy"]["mape"] == pytest.approx(0, abs=0.1)
    assert boosting["accuracy"]["count"] == ours["accuracy"]["count"] == 6
    first = ours["predictions"][0]
    assert first["low"] < first["predicted"] < first["high"]
    assert {p["architecture"] for p in ours["predictions"]} == set(ARCHITECTURES[4:])


@pytest.mark.parametrize(
    ("environment", "card"),
    [({}, "a100"), ({"device_memory_mib": 40_960}, "a100 sxm4 40gb"),
     ({"device_name": "NVIDIA A100 80GB PCIe", "device_memory_mib": 81_920}, "a100 pcie 80gb")],
)  # fmt: skip
def test_labels_determine_the_data_sheet(home, sheets, environment, card):
    labels = [
        replace(m, device="a100", environment=environment) for m in read_labels(sheets[0])[:3]
    ]
    bench = Workbench(metric="memory_mib", processes=1, watch=lambda *_: None)
    prepared = bench.prepared(labels)
    assert (prepared.device, prepared.card) == ("a100", card)


def test_the_same_seed_gives_the_same_numbers(report, sheets):
    estimators = "--estimator", "xgboost", "--estimator", "trappm-laptop-random"
    first, again = (report("--labels", sheets[2], *estimators, "--seeds", 2) for _ in range(2))
    assert first == again
    assert first["seeds"] == [1337, 1338]
    assert [r["split"] for r in first["results"]] == ["architectures"] * 2


def test_only_usable_rows_are_evaluated(report, sheets, tmp_path):
    reading = tmp_path / "reading.csv"
    rows = [(name, batch, "usable" if batch > 8 else "died", int(batch == 32))
            for name in ARCHITECTURES for batch in (8, 16, 32)]  # fmt: skip
    with reading.open("w", newline="") as file:
        csv.writer(file).writerows([("architecture", "batch_size", "class", "spike"), *rows])
    files = "--train", sheets[0], "--test", sheets[1], "--usable", reading
    (result,) = report(*files, "--estimator", "faketensor")["results"]
    assert result["accuracy"]["count"] == 4
    assert result["without_spikes"]["count"] == 2
