"""Whole campaigns for real of what `test_main_job` does not measure: ranks, and transformers.

Each is as small as it can be; its protocol does not mind a busy machine.
"""

import json
import os
import sqlite3
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from absent_packages import environment_without
from test_main_job import PATIENT

pytestmark = pytest.mark.timeout(1800)

ANY_MACHINE = {
    "protocol": PATIENT,
    "canary": False,
    "rounds": {"count": 1, "source": 2},
}  # fmt: skip


class Campaign:
    """A data folder with one campaign that ran to its end, and what is typed at it."""

    def __init__(self, folder, spec):
        self.folder = folder
        (folder / "small.yaml").write_text(yaml.safe_dump(spec | ANY_MACHINE))
        launched = self.trappm("campaign", "launch", "small.yaml")
        assert launched.returncode == 0, launched.stdout + launched.stderr
        self.output = launched.stdout

    def trappm(self, *arguments):
        return subprocess.run(
            [Path(sys.executable).with_name("trappm"), *arguments],
            env={**os.environ, "TRAPPM_HOME": str(self.folder / "home"), "COLUMNS": "80"},
            cwd=self.folder, capture_output=True, text=True, check=False, timeout=1500,
        )  # fmt: skip

    def json(self, *arguments):
        done = self.trappm(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_a_campaign_measures_ranks_and_predicts(tmp_path):
    campaign = Campaign(tmp_path, {
        "name": "ranks",
        "devices": {"source": "cpu-2x1t"},
        "evaluation": {"source": 2, "architecture_share": 0.3},
        "initial": {"source": 4},
        "pool": {"groups": [{
            "architectures": [
                "test_resnet", "test_efficientnet", "test_vit", "resnet10t", "mnasnet_small",
            ],
            "batch_sizes": [2, 4], "input_sizes": [64],
        }]},
    })  # fmt: skip
    labels = campaign.json("labels", "query", "--device", "cpu-2x1t")
    assert len(labels) == 2 + 4 + 2
    with sqlite3.connect(campaign.folder / "home" / "labels.db") as connection:
        rows = connection.execute("SELECT environment FROM measurements WHERE outcome = 'ok'")
        facts = [json.loads(environment) for (environment,) in rows]
    assert {fact["world_size"] for fact in facts} == {2}
    question = ("predict", "test_resnet", "--batch-size", "2", "--input-size", "64")
    answer = campaign.json(*question, "--device", "cpu-2x1t")
    assert answer["step_time_ms"] > 0
    assert answer["memory_mib"] > 0


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    """The preset with the smallest of its models, and one value of each setting that takes time."""
    pytest.importorskip("transformers")
    text = files("trappm.cluster").joinpath("presets/transformers.yaml").read_text()
    spec = yaml.safe_load(text)
    for group in spec["pool"]["groups"]:
        names = group["architectures"]
        group["architectures"] = [n for n in names if n.endswith("-micro")] or ["hf:gpt2-micro"]
        for size in ("sequence_lengths", "input_sizes"):
            if size in group:
                group[size] = group[size][:1]
        group["batch_sizes"] = [2]
    spec |= {
        "devices": {"source": "cpu-2t"},
        "evaluation": {"source": 2, "architecture_share": 0.3},
        "initial": {"source": 6},
    }
    return Campaign(tmp_path_factory.mktemp("transformers"), spec)


@pytest.mark.slow
def test_a_campaign_measures_transformers_with_all_training_options(transformers):
    assert " tokens" in transformers.output
    labels = transformers.json("labels", "query")
    assert len(labels) == 2 + 6 + 2
    assert all(row["architecture"].startswith("hf:") for row in labels)
    assert {row["optimizer"] for row in labels} == {"adamw"}
    assert any("," in row["architecture"] for row in labels)  # not all are trained in full
    assert transformers.json("campaign", "report")["state"] == "finished"


@pytest.mark.slow
def test_unmeasured_training_options_are_predicted(transformers):
    question = ("predict", "hf:bert-micro,lora=3", "--sequence-length", "40", "--batch-size", "2")
    answer = transformers.json(*question, "--optimizer", "adamw", "--device", "cpu-2t")
    low, high = answer["intervals"]["step_time_ms"]
    assert low < answer["step_time_ms"] < high
    assert answer["memory_mib"] > 0


def test_the_preset_names_the_missing_extra(tmp_path):
    environment = environment_without(["transformers", "peft"], tmp_path)
    refused = subprocess.run(
        [sys.executable, "-c", "from trappm.cli import main; main()", "campaign", "launch",
         "--preset", "transformers"],
        env=environment | {"TRAPPM_HOME": str(tmp_path / "home")}, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.endswith("pip install 'trappm[transformers]'")
