"""`ray_config.yaml`: accepted by Ray's own validation, with the nodes that devices are placed on.

`ray up` has no dry run; the validation is private to Ray, but it is what `ray up` itself calls.
"""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from trappm.cluster.ray_runtime import ACCELERATOR_LABEL, placement

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "ray_config.yaml").read_text())


def _validate(config: dict[str, Any]) -> dict[str, Any]:
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_ray_accepts_the_file(config):
    prepared = _validate(config)
    assert prepared["head_node_type"] == "head"
    assert prepared["available_node_types"]["head"]["max_workers"] == 0


def _unknown_key(config):
    config["max_worker"] = 3


def _unknown_node_key(config):
    config["available_node_types"]["a100"]["label"] = {ACCELERATOR_LABEL: "A100"}


def _label_not_text(config):
    config["available_node_types"]["v100"]["labels"] = {ACCELERATOR_LABEL: 100}


def _no_resources(config):
    del config["available_node_types"]["a100"]["resources"]


def _head_missing(config):
    config["head_node_type"] = "boss"


@pytest.mark.parametrize(
    "spoil", [_unknown_key, _unknown_node_key, _label_not_text, _no_resources, _head_missing]
)
def test_ray_rejects_a_spoilt_file(config, spoil):
    spoil(config)
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        _validate(config)


@pytest.mark.parametrize("device", ["a100", "v100"])
def test_a_worker_group_offers_what_the_device_asks_for(config, device):
    wanted = placement(device)
    group = _validate(config)["available_node_types"][device]
    assert wanted.suits({"Labels": group["labels"]})
    # No core: a node of few cores and several GPUs measures on all of them.
    assert wanted.options == {"num_gpus": 1, "num_cpus": 0, "label_selector": group["labels"]}
    assert group["resources"]["GPU"] == 1
    assert group["min_workers"] == 0
    assert group["max_workers"] >= 1


def test_the_head_neither_measures_nor_scales(config):
    head = config["available_node_types"]["head"]
    assert "GPU" not in head["resources"]
    assert "labels" not in head


def test_every_node_authenticates_and_reports_nothing(config):
    prepared = _validate(config)
    for setup in (prepared["head_setup_commands"], prepared["worker_setup_commands"]):
        assert any("RAY_AUTH_MODE=token" in command for command in setup)
        assert any("RAY_USAGE_STATS_ENABLED=0" in command for command in setup)
        installs = [command for command in setup if "dist/trappm-" in command]
        assert installs
        assert all("-c constraints.txt" in command for command in installs)
        assert all('"$wheel[postgresql]"' in command for command in installs)
    starts = prepared["head_start_ray_commands"] + prepared["worker_start_ray_commands"]
    assert all(". /home/ubuntu/trappm/environment;" in command for command in starts)


def test_all_gpus_have_one_software_stack_that_the_v100_is_in(config):
    prepared = _validate(config)
    types = prepared["available_node_types"].values()
    assert not any("worker_setup_commands" in node_type for node_type in types)
    (torch,) = [c for c in prepared["worker_setup_commands"] if "torch torchvision" in c]
    assert "--index-url https://download.pytorch.org/whl/cu126 " in torch


def test_the_environment_command_can_run_twice_and_is_what_a_login_shell_gets(config, tmp_path):
    (command,) = [c for c in config["setup_commands"] if "RAY_AUTH_MODE" in c]
    (tmp_path / "trappm").mkdir()
    shell_env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for _ in range(2):
        subprocess.run(
            ["bash", "-c", command.replace("/home/ubuntu", str(tmp_path))],
            env=shell_env,
            check=True,
        )
    rc = (tmp_path / ".bashrc").read_text()
    assert len(rc.splitlines()) == 1
    shown = subprocess.run(
        ["bash", "-c", f"{rc}\nenv"], env=shell_env, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert {"RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0"} <= set(shown)
    assert f"PATH={tmp_path}/trappm/venv/bin:/usr/bin:/bin" in shown


def test_no_secret_is_in_the_file(config):
    assert "/home/ubuntu/.ray/auth_token" in config["file_mounts"]
    assert not re.search(r"RAY_AUTH_TOKEN\s*[=:]", (ROOT / "ray_config.yaml").read_text())
