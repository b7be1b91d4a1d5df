"""Sweeps that are killed, torn, retried and run on a full disk."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import test_canary
from hypothesis import given
from hypothesis import strategies as st

from trappm import cli
from trappm.profiler.devices import local_devices
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.files.json_lines import JsonLines
from trappm.profiler.measuring.canary import CanaryReading
from trappm.profiler.measuring.sweep import Sweep, duration, read_configurations
from trappm.profiler.records import Configuration, Measurement, Outcome, Protocol
from trappm.profiler.steps.sampling import summarize

KEY, PROTOCOL = "cpu-1t", Protocol(name="test")
STACK = {"device": KEY, "torch": "2.13.0"}


def configuration(number):
    return Configuration(architecture=f"model{number}", batch_size=1, input_size=64)


def measured(what, outcome=Outcome.OK, **fields):
    ok = outcome is Outcome.OK
    return Measurement(
        configuration=what,
        device=KEY,
        outcome=outcome,
        protocol=PROTOCOL,
        started_at="2026-11-21T12:00:00+00:00",
        duration_s=1.0,
        step_samples_ms=(10.0,) if ok else (),
        step=summarize((10.0,)) if ok else None,
        **{
            "failed_in": None if ok else "measure",
            "message": None if ok else "why",
            "environment": STACK,
            **fields,
        },
    )


def lines_of(path):
    return [Measurement.from_dict(json.loads(line)) for line in path.read_bytes().splitlines()]


def run_sweep(path, configurations, measure, *, retries=2):
    messages = []
    with JsonLines(path, Measurement) as results:
        sweep = Sweep(configurations, results, KEY, PROTOCOL, STACK, retries=retries)
        sweep.run(measure, messages.append)
    return sweep, messages


def test_every_configuration_is_measured_once_in_order(tmp_path):
    wanted = [configuration(n) for n in (3, 1, 2, 1)]
    sweep, messages = run_sweep(tmp_path / "out", wanted, measured)
    assert [m.configuration for m in lines_of(tmp_path / "out")] == wanted[:3]
    assert (sweep.settled, sweep.attempts, sweep.outcomes) == (3, 3, Counter({Outcome.OK: 3}))
    assert messages[0].startswith("[1/3] model3")
    assert "left" in messages[0]
    assert "left" not in messages[2]
    again, messages = run_sweep(tmp_path / "out", wanted, measured)
    assert messages == []
    assert again.outcomes == sweep.outcomes


def test_another_protocol_or_device_does_not_count(tmp_path):
    run_sweep(tmp_path / "out", [configuration(1)], measured)
    with JsonLines(tmp_path / "out", Measurement) as results:
        assert Sweep([configuration(1)], results, KEY, Protocol(name="x"), STACK).settled == 0
        assert Sweep([configuration(1)], results, "cpu-2t", PROTOCOL, STACK).settled == 0
        assert Sweep([configuration(1)], results, KEY, PROTOCOL, STACK).settled == 1


def test_results_of_another_stack_are_refused(tmp_path):
    run_sweep(tmp_path / "out", [configuration(1)], measured)
    with (
        JsonLines(tmp_path / "out", Measurement) as results,
        pytest.raises(InputError, match=r"torch '2.13.0' instead of '2.14.0'\); name another file"),
    ):
        Sweep([configuration(1)], results, KEY, PROTOCOL, {**STACK, "torch": "2.14.0"})


def test_a_worker_that_broke_down_early_has_no_stack_to_compare(tmp_path):
    broken = measured(configuration(1), Outcome.ERROR, failed_in="worker", environment={})
    with JsonLines(tmp_path / "out", Measurement) as results:
        results.append(broken)
    sweep, _ = run_sweep(tmp_path / "out", [configuration(1)], measured)
    assert (sweep.measured, sweep.attempts) == (1, 2)


def test_only_what_is_ok_counts_as_measured(tmp_path):
    sweep, _ = run_sweep(
        tmp_path / "out",
        [configuration(1), configuration(2)],
        lambda c: measured(c, Outcome.OK if c == configuration(1) else Outcome.TIMEOUT),
    )
    assert (sweep.settled, sweep.measured) == (2, 1)


def out_of_memory(**detail_mib):
    return {"outcome": Outcome.OOM, "memory_detail_mib": detail_mib}


@pytest.mark.parametrize(
    ("fields", "tries"),
    [
        ({"outcome": Outcome.UNSTABLE}, 3),
        ({"outcome": Outcome.ERROR, "failed_in": "worker"}, 3),
        (out_of_memory(capacity=100.0, host_memory=1000.0), 3),
        (out_of_memory(capacity=900.0, host_memory=1000.0), 1),
        (out_of_memory(capacity=40_000.0), 1),
        (out_of_memory(capacity=30_000.0, device_memory=40_000.0), 3),
        ({"outcome": Outcome.ERROR}, 1),
        ({"outcome": Outcome.TIMEOUT}, 1),
        ({"outcome": Outcome.UNSUPPORTED}, 1),
    ],
)
def test_only_what_may_pass_is_tried_again(tmp_path, fields, tries):
    def measure(what):
        return measured(what, **fields) if what == configuration(1) else measured(what)

    sweep, messages = run_sweep(tmp_path / "out", [configuration(n) for n in (1, 2, 3)], measure)
    order = [m.configuration.architecture for m in lines_of(tmp_path / "out")]
    assert order == ["model1", "model2", "model3", *["model1"] * (tries - 1)]  # after the others
    assert sweep.settled == 3
    assert sweep.outcomes[Outcome.OK] == 2
    assert sum("to be tried again" in line for line in messages) == tries - 1


def test_a_retry_may_succeed_and_counts_across_runs(tmp_path):
    outcomes = iter([Outcome.UNSTABLE, Outcome.UNSTABLE, Outcome.OK])
    sweep, _ = run_sweep(
        tmp_path / "out", [configuration(1)], lambda c: measured(c, next(outcomes)), retries=5
    )
    assert sweep.outcomes == {Outcome.OK: 1}
    assert sweep.attempts == 3
    shaky = [measured(configuration(2), Outcome.UNSTABLE) for _ in range(2)]
    with JsonLines(tmp_path / "out", Measurement) as results:
        for measurement in shaky:
            results.append(measurement)
    _, messages = run_sweep(
        tmp_path / "out", [configuration(2)], lambda c: measured(c, Outcome.UNSTABLE), retries=2
    )
    assert len(messages) == 1  # two of three attempts were there already


def test_broken_worker_ends_the_sweep(tmp_path):
    def measure(what):
        return measured(what, Outcome.ERROR, failed_in="worker", message="no torch")

    with pytest.raises(TrappmError, match="no torch"):
        run_sweep(tmp_path / "out", [configuration(n) for n in range(9)], measure)
    assert len(lines_of(tmp_path / "out")) == 3


SWEEP = """
import sys, time
sys.path[:0] = sys.argv[3].split(":")
import resource
if sys.argv[4:]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
from pathlib import Path
from test_sweep import *

def measure(what):
    time.sleep(0.002)
    return measured(what, environment={**STACK, "padding": "x" * 20_000})

with JsonLines(Path(sys.argv[1]), Measurement) as results:
    wanted = [configuration(n) for n in range(int(sys.argv[2]))]
    sweep = Sweep(wanted, results, KEY, PROTOCOL, STACK)
    print("begins", flush=True)
    sweep.run(measure, lambda line: None)
print("done", flush=True)
"""


def start_sweep(path, count, *file_limit_bytes):
    arguments = [str(path), str(count), ":".join(sys.path), *map(str, file_limit_bytes)]
    return subprocess.Popen(
        [sys.executable, "-c", SWEEP, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_sweeps_lose_and_repeat_nothing(tmp_path):
    path, chance = tmp_path / "out", random.Random(0)
    for _ in range(3):
        process = start_sweep(path, 400)
        process.stdout.readline()
        time.sleep(0.05 + chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        # What is whole by now must still be there in the end.
        whole = path.read_bytes().rpartition(b"\n")[0]
    out, error = start_sweep(path, 400).communicate()
    assert "done" in out, error
    assert path.read_bytes().startswith(whole)
    assert [m.configuration for m in lines_of(path)] == [configuration(n) for n in range(400)]


@given(cut=st.integers(0, 10_000))
def test_torn_line_is_cut_off_wherever_it_was_torn(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("torn") / "out"
    run_sweep(path, [configuration(n) for n in range(3)], measured)
    lines = path.read_bytes().splitlines(keepends=True)
    last = lines[2][: cut % len(lines[2])]
    path.write_bytes(b"".join(lines[:2]) + last)
    run_sweep(path, [configuration(n) for n in range(3)], measured)
    recorded = lines_of(path)
    assert [m.configuration for m in recorded] == [configuration(n) for n in range(3)]
    # A line that lacks nothing but its end is no torn one, and is kept.
    assert (recorded[2].attempt_key in last.decode()) == (len(last) == len(lines[2]) - 1)
    path.unlink()


@pytest.mark.parametrize(
    "content", [b"{}\n", b"not ours", b'{"configuration": 1}\n', b"[1]\n", b"{architecture: x}"]
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path, content):
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(InputError, match="line 1"):
        JsonLines(path, Measurement)
    assert path.read_bytes() == content


def test_results_have_one_writer(tmp_path):
    with (
        JsonLines(tmp_path / "out", Measurement),
        pytest.raises(InputError, match="another process"),
    ):
        JsonLines(tmp_path / "out", Measurement)
    JsonLines(tmp_path / "out", Measurement).close()
    for wrong in (tmp_path, tmp_path / "none" / "out", Path("/dev/null")):
        with pytest.raises(InputError):
            JsonLines(wrong, Measurement)


def test_file_limit_ends_with_one_error_and_loses_nothing(tmp_path):
    path = tmp_path / "out"
    _, error = start_sweep(path, 100, 300_000).communicate()
    assert "File too large" in error.splitlines()[-1]
    assert path.stat().st_size <= 300_000
    kept = path.read_bytes()
    assert kept.endswith(b"\n")
    assert 0 < len(lines_of(path)) < 100
    out, error = start_sweep(path, 100).communicate()  # without a limit
    assert "done" in out, error
    assert path.read_bytes().startswith(kept)
    assert len(lines_of(path)) == 100


def test_interrupted_sweep_says_how_far_it_is(tmp_path):
    """Ctrl-C on the command line, while it waits for a lock that somebody else has."""
    wanted = tmp_path / "list.jsonl"
    wanted.write_text(json.dumps(configuration(1).to_dict()), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", "from trappm.cli import main; main()", "measure",
         "--sweep", str(wanted), "--device", KEY, "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may have told them to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    while not (tmp_path / "out").exists():  # it is at work, or about to be
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130, error
    assert "stopped after 0 of 1; the same command continues" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "LIST"], "--out"),
        (["--sweep", "LIST", "--out", "OUT", "--batch-size", "2"], "batch_size must be in"),
        (["--sweep", "LIST", "--out", "OUT", "--retries", "-1"], "--retries"),
        (["--sweep", "LIST", "--out", "OUT", "--shuffle", "-1"], "--shuffle"),
        (["--sweep", "/dev/zero", "--out", "OUT"], "not a plain file"),
        (["--sweep", "FIFO", "--out", "OUT"], "not a plain file"),
        (["--sweep", "LIST", "--out", "OUT", "--canary", "0"], "every_measurements"),
        (["--sweep", "none.jsonl", "--out", "OUT"], "none.jsonl"),
        (["resnet18", "--sweep", "LIST", "--out", "OUT"], "architecture must be in the list"),
        (["resnet18", "--out", "OUT"], "--out needs --sweep"),
        ([], "name an architecture"),
    ],
)
def test_wrong_command_is_one_line(tmp_path, capsys, arguments, message):
    (tmp_path / "LIST").write_text(json.dumps(configuration(1).to_dict()), encoding="utf-8")
    os.mkfifo(tmp_path / "FIFO")
    places = {name: str(tmp_path / name) for name in ("LIST", "OUT", "FIFO")}
    messages = [places.get(argument, argument) for argument in arguments]
    assert cli.run(["measure", *messages, "--device", KEY]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[0]
    assert "Traceback" not in error


def test_readings_of_the_canary_are_kept_like_results(tmp_path):
    path = tmp_path / "out.canary"
    readings = test_canary.read_all([test_canary.measured(t) for t in (100.0, 130.0)])
    with JsonLines(path, CanaryReading) as file:
        for reading in readings:
            file.append(reading)
    with JsonLines(path, CanaryReading) as file:
        assert list(file.earlier) == readings


def test_devices_of_this_machine_are_listed(capsys):
    assert cli.run(["measure", "--devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == local_devices()
    assert all("GiB" in line for line in lines if line.startswith("cpu-"))


def test_durations_are_told_in_the_units_that_matter():
    assert [duration(s) for s in (3, 99, 180, 7800)] == ["3 s", "99 s", "3 min", "2 h 10 min"]


# The lists that sweeps measure.


GROUP = {"architectures": ["test_resnet", "test_vi*"], "batch_sizes": [1, 2], "input_sizes": [64]}


def test_lists_are_read_from_lines_and_documents(tmp_path):
    entries = [configuration(2).to_dict(), configuration(1).to_dict(), configuration(2).to_dict()]
    lines = tmp_path / "list.jsonl"
    lines.write_text("\n".join(map(json.dumps, entries)) + "\n\n", encoding="utf-8")
    document = tmp_path / "list.json"
    document.write_text(json.dumps(entries), encoding="utf-8")
    expected = [configuration(2), configuration(1)]
    assert read_configurations(lines) == read_configurations(document) == expected


def test_groups_are_those_of_a_pool(tmp_path):
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps({"groups": [GROUP]}), encoding="utf-8")
    actual = read_configurations(path)
    assert {c.architecture for c in actual} >= {"test_resnet", "test_vit"}
    assert {c.batch_size for c in actual} == {1, 2}
    path.write_text(json.dumps([configuration(9).to_dict(), GROUP]), encoding="utf-8")
    assert read_configurations(path) == [configuration(9), *actual]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no configurations"),
        ("[", "line 1 .* is not JSON"),
        ('{"architecture": "x"}', "batch_size is missing"),
        (
            '{"architecture": "x", "batch_size": 1, "input_size": 2, "sizes": 3}',
            "unknown key 'sizes'",
        ),
        ('{"architecture": "x", "batch_size": 0, "input_size": 2}', "batch_size is 0"),
        ('{"architecture": ["x"], "batch_size": 1, "input_size": 2}', "must be a name"),
        ('{"architectures": "x", "batch_sizes": [1], "input_sizes": [2]}', "lists of names"),
        ('{"architectures": [1], "batch_sizes": [1], "input_sizes": [2]}', "lists of names"),
        ('{"architectures": ["x"], "batch_sizes": [], "input_sizes": [2]}', "batch_sizes is empty"),
        ('{"batch_sizes": [1], "input_sizes": [2]}', "neither architectures nor families"),
        ("7", "neither a configuration"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_wrong_line_is_told(tmp_path, text, message):
    path = tmp_path / "list.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_configurations(path)


@pytest.mark.parametrize(
    "text", ["a: b", "- [", "!!python/object/apply:os.system [ls]", "7", "[" * 5000, "\0"]
)
def test_wrong_document_is_told(tmp_path, text):
    path = tmp_path / "list.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"list\.yaml"):
        read_configurations(path)
