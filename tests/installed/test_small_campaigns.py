"""A campaign for real of what `test_main_job` does not measure: transformers, by their preset."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from test_main_job import PATIENT

TRAPPM = Path(sys.executable).with_name("trappm")


def run(folder, *words):
    done = subprocess.run(
        [TRAPPM, *words], env={**os.environ, "TRAPPM_HOME": str(folder / "home")}, cwd=folder,
        capture_output=True, text=True, check=False, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
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
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(spec))
    assert " tokens" in run(tmp_path, "campaign", "launch", "small.yaml")
    labels = json.loads(run(tmp_path, "labels", "query", "--json"))
    assert len(labels) == 2 + 6 + 2
    assert all(row["architecture"].startswith("hf:") for row in labels)
    assert {row["optimizer"] for row in labels} == {"adamw"}
    assert any("," in row["architecture"] for row in labels)  # not all are trained in full
    unmeasured = "hf:bert-micro,lora=3 --sequence-length 40 --batch-size 2 --optimizer adamw"
    command = ("predict", *unmeasured.split(), "--device", "cpu-2t", "--json")
    answer = json.loads(run(tmp_path, *command))
    low, high = answer["intervals"]["step_time_ms"]
    assert low < answer["step_time_ms"] < high
    assert answer["memory_mib"] > 0
