"""A campaign on a real, private Ray and a core of this machine: kernels first, then its steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_main_job import PATIENT

from trappm.cluster.campaign.history import training_labels
from trappm.store import Store

SPEC = {
    "name": "kernels-first",
    "devices": {"source": "cpu-1t"},
    "characterise": {"seconds": 2, "cpus": True},
    "canary": False,
    "protocol": PATIENT,
    "evaluation": {"source": 2, "architecture_share": 0.4},
    "initial": {"source": 4},
    "rounds": {"count": 0, "source": 0},
    "pool": {
        "groups": [
            {"architectures": ["test_resnet", "test_vit", "test_efficientnet"],
             "batch_sizes": [2, 4], "input_sizes": [64]}
        ]
    },
}  # fmt: skip
CATALOGUE = 150
"""Kernels of a device, at least."""


@pytest.mark.slow
def test_kernels_are_stored_before_the_first_label_and_once(tmp_path):
    file = tmp_path / "campaign.yaml"
    file.write_text(yaml.safe_dump(SPEC))

    def trappm(*arguments):
        done = subprocess.run(
            [Path(sys.executable).with_name("trappm"), *arguments],
            capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path,
            env={**os.environ, "TRAPPM_HOME": str(tmp_path / "home")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    output = trappm("campaign", "launch", str(file))
    lines = [line for line in output.splitlines() if "cpu-1t  " in line]
    assert "kernels timed" in lines[0]
    with Store.open_to_read(f"sqlite:///{tmp_path}/home/labels.db") as store:
        kernels, labels = [*store.kernels.each()], store.labels.matching()
        assert len({kernel.call for kernel in kernels}) >= CATALOGUE
        assert len(labels) == 6
        known = training_labels(store, store.campaigns.all()[0].id)
        assert len(known.kernels["cpu-1t"]) >= CATALOGUE  # of the stack of its labels
    assert json.loads(trappm("devices", "cpu-1t", "--json"))[0]["kernels"] == len(kernels)
