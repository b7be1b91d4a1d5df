"""The main job for real: models measured on these cores, from the pool to a prediction.

The campaign is as small as it can be, and its protocol does not mind a busy machine, since a test
must pass next to others; everything else is what `make campaign` runs. Real processes are killed.
"""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import psutil
import pytest
import yaml
from terminal import Terminal

PATIENT = {
    "name": "patient", "warmup_steps": 1, "min_steps": 3, "max_steps": 5, "max_seconds": 0.3,
    "timeout_s": 120, "unstable_relative_iqr": 1e9, "unstable_lost_share": 1.0,
}  # fmt: skip
"""A protocol that does not mind a busy machine."""
SPEC = {
    "name": "tiny",
    "devices": {"source": "cpu-2t", "target": "cpu-1t"},
    "protocol": PATIENT,
    "canary": {
        "configuration": {"architecture": "test_resnet", "batch_size": 2, "input_size": 64},
        "every_measurements": 10, "drifting_relative": 1e9, "stop_relative": 1e9,
        "confirmations": 100,
    },
    "learner": "laptop",
    "evaluation": {"source": 3, "target": 2, "architecture_share": 0.3},  # a plot has three
    "initial": {"source": 4, "target": 4},
    "rounds": {"count": 1, "source": 1, "target": 1},
    "pool": {"groups": [{  # the first step of each architecture takes seconds, others less
        "architectures": ["test_convnext", "test_resnet", "test_vit"],
        "batch_sizes": [2, 4, 8], "input_sizes": [64],
    }]},
}  # fmt: skip
BUDGET = {"cpu-2t": 3 + 4 + 1, "cpu-1t": 2 + 4 + 1}
pytestmark = pytest.mark.timeout(1800)  # four launches of Ray, on a machine that may be busy

MEASURING = "import sys; sys.path[:]"
"""How a fork server, and so a measuring process, looks in the process table."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """A campaign that finished although two of its processes were killed."""
    folder = tmp_path_factory.mktemp("main-job")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(SPEC))
    run = Run(folder)
    run.kill_after_labels(1, run.profiler_and_go_on)
    run.kill_after_labels(3, run.measurement_and_go_on)
    run.finish()
    return run


def plain(raw):
    """What a command wrote, without what only moves the cursor or colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r\n", "\n")


class Run:
    """One data folder, and the commands that are typed at it."""

    def __init__(self, folder):
        self.folder = folder
        self.home = folder / "home"
        self.terminal = None
        self.started = False
        self.output = ""

    def trappm(self, *arguments):
        return subprocess.run(
            [Path(sys.executable).with_name("trappm"), *arguments],
            capture_output=True, text=True, timeout=600, check=False,
            env=self.environment, cwd=self.folder,
        )  # fmt: skip

    @property
    def environment(self):
        return {**os.environ, "TRAPPM_HOME": str(self.home), "COLUMNS": "160"}

    def go_on(self):
        """The campaign's command, typed in a terminal unless it runs there already."""
        if self.terminal is None:
            command = (
                ["campaign", "resume"] if self.started else ["campaign", "launch", "tiny.yaml"]
            )
            self.terminal = Terminal(
                [Path(sys.executable).with_name("trappm"), *command],
                env=self.environment, cwd=self.folder,
            )  # fmt: skip
        return self.terminal

    def attempts(self):
        database = self.home / "labels.db"
        if not database.exists():
            return 0
        try:
            with sqlite3.connect(database, timeout=30) as connection:
                return connection.execute("SELECT count(*) FROM measurements").fetchone()[0]
        except sqlite3.OperationalError:  # its tables are being made
            return 0

    def kill_after_labels(self, count, kill):
        terminal = self.go_on()
        deadline = time.monotonic() + 900
        while self.attempts() < count:
            assert terminal.process.poll() is None, terminal.raw
            assert time.monotonic() < deadline, "the campaign measures nothing"
            time.sleep(0.05)
        self.started = True
        kill(terminal)

    def interrupt(self, terminal):
        """Ctrl-C, and what is then told."""
        terminal.type("\x03")
        assert terminal.wait(120) == 130, terminal.raw
        assert "trappm campaign resume" in terminal.screen
        assert "Traceback" not in terminal.raw
        states = [
            c["state"] for c in json.loads(self.trappm("campaign", "status", "--json").stdout)
        ]
        assert states == ["paused"]
        self.terminal = None

    def profiler_and_go_on(self, terminal):
        self._kill_one(terminal.process, lambda p: p.name().startswith("ray::Profil"))

    def measurement_and_go_on(self, terminal):
        def measures(p):
            parent = p.parent()
            return (
                any(MEASURING in " ".join(x.cmdline()) for x in (p, parent) if x)
                and not p.children()
            )

        self._kill_one(terminal.process, measures)

    def _kill_one(self, process, wanted):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for child in psutil.Process(process.pid).children(recursive=True):
                try:
                    if wanted(child):
                        child.send_signal(signal.SIGKILL)
                        return
                except psutil.Error:
                    continue
            time.sleep(0.05)
        raise AssertionError("found nothing to kill")

    def finish(self):
        terminal = self.go_on()
        status = terminal.wait(1200)
        self.output = plain(terminal.raw)
        assert status == 0, self.output

    def query(self, sql):
        with sqlite3.connect(self.home / "labels.db") as connection:
            return connection.execute(sql).fetchall()


def is_whole(campaign):
    """All of the budget is measured, each assignment once."""
    join = "SELECT d.key, count(*) FROM labels l JOIN devices d ON d.id = l.device_id GROUP BY 1"
    assert dict(campaign.query(join)) == BUDGET
    states = campaign.query("SELECT state, count(*) FROM assignments GROUP BY state")
    assert states == [("done", sum(BUDGET.values()))]
    return True


def test_every_assignment_is_measured_once_although_processes_are_killed(campaign):
    assert is_whole(campaign)


@pytest.mark.slow
def test_a_campaign_is_interrupted_and_resumed(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SPEC))
    run = Run(tmp_path)
    run.kill_after_labels(4, run.interrupt)
    run.finish()
    assert is_whole(run)


def test_measurements_are_real(campaign):
    rows = campaign.query(
        "SELECT step_samples_ms, memory_mib, power_w, missing, environment FROM measurements"
        " WHERE outcome = 'ok'"
    )
    for samples, memory_mib, power_w, missing, environment in rows:
        facts = json.loads(environment)
        assert 3 * 4 <= len(samples) <= 5 * 4
        assert memory_mib > 0
        assert (power_w is None) == ("power_w" in json.loads(missing))
        assert facts["torch"].startswith("2.")
        assert facts["threads"] in {1, 2}


def test_the_report_shows_outcomes_errors_and_next_commands(campaign):
    for phrase in (
        "attempts by outcome", "error on architectures held out", "transfer: heads of the target",
        "trappm predict resnet18 --batch-size 4 --input-size 96 --device cpu-2t",
    ):  # fmt: skip
        assert phrase in campaign.output
    (listed,) = json.loads(campaign.trappm("campaign", "status", "--json").stdout)
    assert listed["state"] == "finished"


def test_a_pulled_snapshot_predicts_the_same_elsewhere(
    campaign, tmp_path, monkeypatch, as_json, printed
):
    words = "predict resnet18 --batch-size 4 --input-size 96 --device cpu-2t"
    monkeypatch.setenv("TRAPPM_HOME", str(campaign.home))
    answer = as_json(words)
    printed("snapshot pull --to", tmp_path / "snapshot")
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    assert as_json(words, "--snapshot", tmp_path / "snapshot") == answer
    assert 1 < answer["memory_mib"] < 60_000
    low, high = answer["intervals"]["step_time_ms"]
    assert low < answer["step_time_ms"] < high


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "says"),
    [("raylet", "continue with: trappm campaign resume"),
     ("gcs_server", "GCS may have been killed")],  # Ray ends our process itself
)  # fmt: skip
def test_a_crashed_ray_service_ends_the_campaign_cleanly(tmp_path, victim, says):
    group = {**SPEC["pool"]["groups"][0], "batch_sizes": [*range(1, 33)]}
    longer = {"pool": {"groups": [group]}, "initial": {"source": 40, "target": 40}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SPEC | longer))
    run = Run(tmp_path)
    family = []

    def kill(terminal):
        family.extend(psutil.Process(terminal.process.pid).children(recursive=True))
        run._kill_one(terminal.process, lambda p: p.name() == victim)

    run.kill_after_labels(1, kill)
    assert run.terminal.wait(600) == 1, run.terminal.raw
    shown = " ".join(plain(run.terminal.raw).split())
    assert says in shown
    assert "Traceback" not in shown
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


@pytest.mark.slow
def test_a_campaign_measures_and_predicts_transformers_with_all_training_options(tmp_path):
    """The preset with the smallest of its models, and one value of each setting that takes time."""
    pytest.importorskip("transformers")
    text = files("trappm.cluster").joinpath("presets/transformers.yaml").read_text()
    spec = yaml.safe_load(text) | {
        "protocol": PATIENT, "canary": False, "rounds": {"count": 1, "source": 2},
        "devices": {"source": "cpu-2t"}, "initial": {"source": 6},
        "evaluation": {"source": 2, "architecture_share": 0.3},
    }  # fmt: skip
    for group in spec["pool"]["groups"]:
        names = group["architectures"]
        group["architectures"] = [n for n in names if n.endswith("-micro")] or ["hf:gpt2-micro"]
        for size in ("sequence_lengths", "input_sizes"):
            if size in group:
                group[size] = group[size][:1]
        group["batch_sizes"] = [2]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(spec))
    run = Run(tmp_path)
    run.finish()
    assert " tokens" in run.output
    labels = json.loads(run.trappm("labels", "query", "--json").stdout)
    assert len(labels) == 2 + 6 + 2
    assert all(row["architecture"].startswith("hf:") for row in labels)
    assert {row["optimizer"] for row in labels} == {"adamw"}
    assert any("," in row["architecture"] for row in labels)  # not all are trained in full
    unmeasured = "hf:bert-micro,lora=3 --sequence-length 40 --batch-size 2 --optimizer adamw"
    command = ("predict", *unmeasured.split(), "--device", "cpu-2t", "--json")
    answer = json.loads(run.trappm(*command).stdout)
    low, high = answer["intervals"]["step_time_ms"]
    assert low < answer["step_time_ms"] < high
    assert answer["memory_mib"] > 0
