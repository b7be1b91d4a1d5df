"""`trappm device`, as a user meets it."""

import json
import os

import pytest
from store_whole import kernel

from trappm import cli
from trappm.profiler.kernels.characterising import Characteriser
from trappm.profiler.kernels.kernel_call import KernelCall, Operator
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.store import Store
from trappm.store.kernel_measurements import export_kernels

SOME = [
    kernel(
        time_ms=1.0, call=KernelCall.of(Operator.MATMUL, batch=1, rows=1000, depth=1000,
        columns=1000), attempt_key="matmul",
    ),
    kernel(time_ms=1.0, call=KernelCall.of(Operator.COPY, batch=1024, width=1024)),
    kernel("error", message="it failed"),
]  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command; its exit status and what it printed."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        capsys.readouterr()
        return cli.run([*map(str, arguments)]), *capsys.readouterr()

    return run


@pytest.fixture
def filled(run, tmp_path):
    path = tmp_path / "kernels.jsonl"
    export_kernels(SOME, path)
    status, out, _ = run("device", "import", path)
    assert (status, out) == (0, "kernels.jsonl: 3 kernels, 3 of them new\n")
    return path


def test_importing_twice_changes_nothing(run, filled):
    assert run("device", "import", filled)[1] == "kernels.jsonl: 3 kernels, 0 of them new\n"


def test_show_says_first_what_the_device_reaches(run, filled):
    device = SOME[0].device
    status, out, _ = run("device", "show", device)
    assert status == 0
    assert out.splitlines()[0] == (
        f"{device} (a CPU): sustained TFLOP/s: 2 in fp32; GB/s: 8.39 in 8 MiB."
    )
    facts = json.loads(run("device", "show", device, "--json")[1])
    assert facts["ceilings"]["tflops"] == {"fp32": 2.0}
    assert facts["outcomes"] == {"ok": 2, "error": 1}
    assert json.loads(run("device", "show", "--json")[1]) == {device: 3}


def test_a_card_that_nobody_measured_stands_on_its_data_sheet(run):
    status, out, _ = run("device", "show", "v100")
    assert status == 0
    first = out.splitlines()[0]
    assert first.startswith("v100: by its data sheet, as no kernel of it was timed: 15.7 ")
    facts = json.loads(run("device", "show", "v100", "--json")[1])
    assert {roof["source"] for roof in facts["roofs"]} == {"data sheet"}
    assert facts["kernels"] == 0


def test_a_step_under_two_rooflines(run, tmp_path, monkeypatch):
    """The answer comes first, and the drawing fits 80 columns (tables in files have no edge)."""
    monkeypatch.setenv("COLUMNS", "80")
    png = tmp_path / "roofline.png"
    command = ["device", "show", "v100", "rtx-3090", "--model", "test_resnet", "--batch-size", "64"]
    status, out, error = run(*command, "--png", png)
    assert status == 0, error
    sentences = out.partition("┌")[0]
    for line, device in zip(sentences.splitlines()[:2], ("v100", "rtx-3090"), strict=True):
        assert f"bounds a training step of test_resnet at batch 64 on {device}: " in line
        assert "Twice the batch does " in line
    drawn = [line for line in out.splitlines() if set(line) & set("│┤└")]
    assert len(drawn) >= 20
    assert all(len(line) <= 80 for line in drawn)
    assert all(any(mark in line for line in drawn) for mark in "ox")
    assert png.read_bytes().startswith(b"\x89PNG")
    first, second = json.loads(run(*command, "--json")[1])
    assert [first["device"], second["device"]] == ["v100", "rtx-3090"]
    for row in (first, second):
        step = row["step"]
        assert sum(step["shares"].values()) == pytest.approx(1)
        kernels = sum(kernel["time_ms"] for kernel in step["kernels"])
        assert 0 < kernels <= step["step_time_ms"]
        assert step["doubled"]["batch_size"] == 128


def test_bad_questions_about_a_step_are_one_line(run, tmp_path):
    for more in (["--model", "resnet9000"], ["--model", "test_resnet", "--phase", "sleep"],
                 ["--model", "test_resnet", "--batch-size", "0"],
                 ["--png", tmp_path / "no" / "file.png"]):  # fmt: skip
        status, _, error = run("device", "show", "v100", *more)
        assert status == 2, more
        assert len(error.splitlines()) == 1


def test_sql_sees_them(run, filled):
    status, out, _ = run(
        "labels", "query", "--sql", "SELECT COUNT(*) AS n FROM kernel_measurements"
    )
    assert status == 0
    assert "3" in out


def test_there_and_back(run, filled, tmp_path):
    path = tmp_path / "again.jsonl"
    assert run("device", "export", SOME[0].device, path)[0] == 0
    assert path.read_text() == filled.read_text()


def test_an_unknown_device_says_what_to_do(run, filled):
    status, _, error = run("device", "show", "v9000")
    assert status == 2
    assert "trappm device characterise v9000" in error
    assert len(error.splitlines()) == 1


def test_a_bad_file_records_nothing(run, filled, tmp_path):
    bad = tmp_path / "bad.jsonl"
    good = kernel(time_ms=1.0, batch=99).to_dict()
    bad.write_text(f"{json.dumps(good)}\nnonsense\n")
    status, _, error = run("device", "import", bad)
    assert status == 2
    assert "line 2" in error
    assert json.loads(run("device", "show", "--json")[1]) == {SOME[0].device: 3}


def test_characterise_keeps_every_attempt_and_answers_first(run, monkeypatch, tmp_path):
    """For real, on a core of this machine, which may be busy; most of the time does not suffice."""
    status, out, error = run("device", "characterise", "cpu-1t", "--seconds", "2")
    assert status == 0, error
    assert out.startswith("cpu-1t: ")
    assert "kernels measured in" in out.splitlines()[0]
    assert "kernel " in error
    with Store.open_to_read(f"sqlite:///{tmp_path}/home/labels.db") as store:
        kept = [*store.kernels.each()]
    assert len({m.call for m in kept}) >= 150
    assert any(m.samples_ms for m in kept)
    assert all(m.time_ms or m.message for m in kept)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_the_links_of_ranks_are_characterised_and_kept(run, tmp_path):
    """For real, over gloo; a busy machine may be too noisy to tell the link."""
    status, out, error = run("device", "characterise", "cpu-2x1t", "--seconds", "3")
    assert status == 0, error
    first, *_, last = out.splitlines()
    assert "collectives measured in" in first
    assert last.startswith("cpu-2x1t: ")
    assert "GB/s a rank (host" in last or "measure them when the host is quiet" in last
    with Store.open_to_read(f"sqlite:///{tmp_path}/home/labels.db") as store:
        kept = [*store.kernels.each(device="cpu-2x1t")]
    assert {m.call["ranks"] for m in kept} == {2}
    assert {m.call.operator for m in kept} == {
        Operator.ALL_REDUCE, Operator.ALL_GATHER, Operator.REDUCE_SCATTER
    }  # fmt: skip
    assert run("device", "show", "cpu-2x1t")[1].splitlines()[-1] == last
    assert run("device", "characterise", "cpu-2x1t-fsdp")[0] == 2


def test_a_kernel_that_cannot_be_kept_costs_itself_and_is_told(run, monkeypatch, tmp_path):
    results = [
        kernel(time_ms=1.0, device="cpu-1t"),
        kernel(time_ms=1.0, device="cpu-1t", batch=9, facts={"name": "a \x00 b"}),
    ]

    def characterise(self, device, *, seconds, on_result):
        for result in results:
            on_result(result, len(results))

    monkeypatch.setattr(Characteriser, "characterise", characterise)
    status, out, _ = run("device", "characterise", "cpu-1t")
    assert status == 0
    assert "1 of 2 not" in out
    assert "cannot be recorded" in out
    with Store.open_to_read(f"sqlite:///{tmp_path}/home/labels.db") as store:
        good, bad = [*store.kernels.each()]
    assert (good.outcome, bad.outcome, bad.failed_in) == ("ok", "error", "record")


def test_characterise_writes_a_file_without_a_database(run, tmp_path):
    path = tmp_path / "kernels.jsonl"
    status, out, error = run(
        "device", "characterise", "cpu-1t", "--seconds", "1", "--out", path, "--json"
    )
    assert status == 0, error
    answer = json.loads(out)
    lines = [KernelMeasurement.from_dict(json.loads(line)) for line in path.open()]
    assert len({line.call for line in lines}) == answer["kernels"] >= 150
    assert answer["device"] == "cpu-1t"
    assert not (tmp_path / "home" / "labels.db").exists()


@pytest.mark.parametrize("arguments", [["cpu-1t", "--seconds", "0"], ["v9000"], ["simulated:a100"]])
def test_bad_input_is_one_line(arguments, run, tmp_path):
    status, _, error = run("device", "characterise", *arguments, "--out", tmp_path / "out")
    assert status == 2
    assert len(error.strip().splitlines()) == 1
