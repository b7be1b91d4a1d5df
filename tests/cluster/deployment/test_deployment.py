"""Files that start clusters, as far as they can be checked without the cluster.

`ray up` has no dry run; the validation is private to Ray, but it is what `ray up` itself calls.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config, with_envs

from trappm.cluster.ray_runtime import placement

ROOT = Path(__file__).parents[3]
CHARACTERS_OF_A_SECRET = re.compile(r"(AUTH_TOKEN|PASSWORD)\S*\s*[=:]\s*['\"]?[0-9a-zA-Z]{8}")
FILES = (
    "ray_config.yaml", "ray_config_on_premises.yaml", "deploy/slurm.sh", "deploy/raycluster.yaml",
    "Dockerfile",
)  # fmt: skip


def loaded(name):
    return yaml.safe_load((ROOT / name).read_text())


def _validate(config):
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


@pytest.mark.parametrize("name", FILES)
def test_nodes_authenticate_without_secrets_in_files_and_measure_at_full_priority(name):
    text = (ROOT / name).read_text()
    assert not CHARACTERS_OF_A_SECRET.search(text)
    assert "RAY_AUTH_MODE=token" in text or "authOptions: {mode: token}" in text
    if name != "deploy/raycluster.yaml":  # which has it from its image
        assert "RAY_USAGE_STATS_ENABLED=0" in text
        assert "RAY_worker_niceness=0" in text
    assert "dashboard-host=0" not in text
    indexes = re.findall(r"(?:--extra-index-url |TORCH_INDEX=)(https\S+)", text)
    assert all(index.startswith("https://download.pytorch.org/whl/") for index in indexes)
    assert not re.search(r"--index-url|PIP_INDEX_URL|pypi\.org|/simple\b", text)


def test_the_on_premises_file_is_accepted_and_its_head_offers_no_gpu():
    on_premises = loaded("ray_config_on_premises.yaml")
    _validate(on_premises)
    assert on_premises["max_workers"] == len(on_premises["provider"]["worker_ips"])
    starts = on_premises["head_start_ray_commands"] + on_premises["worker_start_ray_commands"]
    assert all(". /home/trappm/trappm/environment;" in command for command in starts)
    (head,) = [c for c in on_premises["head_start_ray_commands"] if "--head" in c]
    assert "--num-gpus=0" in head
    assert "--dashboard-host=127.0.0.1" in head
    installs = [c for c in on_premises["setup_commands"] if "pip install" in c]
    assert installs
    assert all("constraints.txt" in command for command in installs)
    on_premises["worker_start_command"] = "ray start"
    with pytest.raises(jsonschema.ValidationError):
        _validate(on_premises)


def test_the_head_on_premises_starts_the_other_hosts(tmp_path):
    """By the autoscaler of version 1, even if `ray up` exports another, and with a key."""
    on_premises = loaded("ray_config_on_premises.yaml")
    assert on_premises["auth"]["ssh_private_key"]  # `ray up` copies it to the head
    (tmp_path / "ray").write_text("#!/bin/sh\necho $1 $RAY_enable_autoscaler_v2\n")
    (tmp_path / "ray").chmod(0o755)
    ray_up = with_envs(on_premises["head_start_ray_commands"], {"RAY_enable_autoscaler_v2": "1"})
    started = subprocess.run(
        ["bash", "-c", "\n".join(ray_up).replace(". /home/trappm/trappm/environment;", "")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "start 0" in started.stdout.splitlines()


def test_the_slurm_script_has_its_directives_before_the_first_command():
    text = (ROOT / "deploy" / "slurm.sh").read_text()
    subprocess.run(["bash", "-n", ROOT / "deploy" / "slurm.sh"], check=True)
    assert text.startswith("#!/bin/bash\n")
    first_command = next(i for i, line in enumerate(text.splitlines()) if re.match(r"[a-z]", line))
    directives = [i for i, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")]
    assert directives
    assert max(directives) < first_command  # Slurm reads none after it


FAKE_SLURM = {
    "scontrol": (
        'if [ "$2" = node ]; then\n'
        '  echo "NodeName=$4 Gres=gpu:8 CfgTRES=cpu=64,mem=1000G,billing=64,gres/gpu=${HAS:-8}'
        ' AllocTRES=cpu=64,gres/gpu=${GETS:-8} CapWatts=n/a"\n'
        'elif [ "$3" = any ]; then printf "%s\\n" $HOSTS; else printf "%s\\n" ${3//,/ }; fi'
    ),
    "srun": 'echo "srun $*" >>"$LOG"; exec sleep 60',
    "ray": "exit 0",
    "trappm": (
        'echo "trappm $* token=${#RAY_AUTH_TOKEN}" >>"$LOG"\n'
        '[ "$2" = pause ] && exit\n'
        'until [ "$(grep -c ^srun "$LOG")" = "${SRUNS:-2}" ]; do sleep 0.1; done\n'
        'sleep "$STAYS"; exit "$ENDS"'
    ),
}


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def slurm(tmp_path, log):
    """Starts the script in an allocation of these HOSTS."""
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name, body in FAKE_SLURM.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_folder / name).chmod(0o755)
    (bin_folder / "python").symlink_to(shutil.which("python3"))

    def start(**settings):
        return subprocess.Popen(
            ["bash", ROOT / "deploy" / "slurm.sh", "campaign.yaml"], cwd=tmp_path, text=True,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "LOG": str(log), "TRAPPM_VENV": str(tmp_path / "venv"),
                 "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "any"} | settings,
        )  # fmt: skip

    return start


@pytest.mark.parametrize(("warned", "ends", "status"), [(False, 2, 2), (True, 130, 0)])
def test_the_slurm_script_starts_every_host_and_pauses_when_slurm_warns(
    slurm, log, warned, ends, status
):
    script = slurm(
        HOSTS="one two three", STAYS="2" if warned else "0", ENDS=str(ends),
        TRAPPM_DATABASE="postgresql+psycopg://user@host/labels",
    )  # fmt: skip
    if warned:
        while not log.exists() or "launch" not in log.read_text():
            assert script.poll() is None
        script.terminate()
    assert script.wait(timeout=60) == status
    lines = log.read_text().splitlines()
    started = [line for line in lines if line.startswith("srun")]
    workers, head = sorted(started, key=lambda line: "--head" in line)
    assert "--nodelist=one" in head
    assert "--nodelist=two,three" in workers
    assert "--address=one:20007" in workers
    errors = [line for line in lines if line.startswith("trappm")]
    assert errors[0] == "trappm campaign launch campaign.yaml --address one:20007 token=64"
    assert ("trappm campaign pause token=64" in errors) == warned


def test_the_slurm_script_starts_both_parts_of_a_heterogeneous_job(slurm, log):
    script = slurm(
        SLURM_HET_SIZE="2", SLURM_JOB_NODELIST_HET_GROUP_0="one,two", SRUNS="3",
        SLURM_JOB_NODELIST_HET_GROUP_1="three,four", STAYS="0", ENDS="0", GETS="1",
        TRAPPM_DATABASE="postgresql+psycopg://user@host/labels",
    )  # fmt: skip
    _, errors = script.communicate(timeout=60)
    assert script.returncode == 0
    lines = log.read_text().splitlines()
    head, *workers = sorted(
        (x for x in lines if x.startswith("srun")), key=lambda x: "--head" not in x
    )
    assert "srun --het-group=0 --nodes=1 --ntasks=1 --nodelist=one " in head
    assert [line.partition(" --overlap")[0] for line in sorted(workers)] == [
        "srun --het-group=0 --nodes=1 --ntasks=1 --nodelist=two",
        "srun --het-group=1 --nodes=2 --ntasks=2 --nodelist=three,four",
    ]
    assert [line for line in errors.splitlines() if "GPUs" in line] == [
        f"slurm.sh: {host} has 8 GPUs and the job gets 1; give sbatch --gpus-per-node=8"
        for host in ("one", "two", "three", "four")
    ]


@pytest.mark.parametrize(
    ("hosts", "variables", "file", "is_refused"),
    [
        ("one two", {}, None, True),
        ("one", {}, None, False),
        ("one two", {}, "postgres://user@host/labels\n", False),
    ],
)
def test_the_slurm_script_refuses_sqlite_on_several_hosts(
    slurm, log, tmp_path, hosts, variables, file, is_refused
):
    if file is not None:
        (tmp_path / "trappm-home").mkdir()
        (tmp_path / "trappm-home" / "database_url").write_text(file)
    sruns = str(len(hosts.split()))
    script = slurm(HOSTS=hosts, STAYS="0", ENDS="0", SRUNS=sruns, **variables)
    _, errors = script.communicate(timeout=60)
    if is_refused:
        assert script.returncode == 2
        (line,) = errors.splitlines()
        assert "PostgreSQL" in line
        assert "--nodes=1" in line
        assert not log.exists()  # nothing was started
    else:
        assert script.returncode == 0
        assert "trappm campaign launch campaign.yaml --address one:20007" in log.read_text()


@pytest.fixture
def kuberay_documents():
    """Documents of the file by kind; parts that share an anchor are separate objects."""
    documents = yaml.safe_load_all((ROOT / "deploy" / "raycluster.yaml").read_text())
    return {document["kind"]: json.loads(json.dumps(document)) for document in documents}


@pytest.fixture
def ray_cluster(kuberay_documents):
    return kuberay_documents["RayCluster"]


@pytest.fixture(scope="module")
def kuberay_schemas():
    """Schemas by kind, which refuse unknown fields: Kubernetes would drop them silently."""

    def close(schema):
        if isinstance(schema, dict):
            if "properties" in schema:
                schema["additionalProperties"] = False
            for part in schema.values():
                close(part)

    schemas = yaml.safe_load((Path(__file__).parent / "kuberay_schema.yaml").read_text())
    for schema in schemas.values():
        close(schema)
        jsonschema.Draft202012Validator.check_schema(schema)
    return schemas


def errors_of(document, schemas):
    """Return the errors of a document of a known kind by their paths."""
    validator = jsonschema.Draft202012Validator(schemas[document["kind"]])
    return {error.json_path: error.message for error in validator.iter_errors(document)}


def test_the_kuberay_file_follows_the_schemas_of_kuberay_and_kubernetes(
    kuberay_documents, kuberay_schemas
):
    assert kuberay_documents.keys() == kuberay_schemas.keys()
    for document in kuberay_documents.values():
        assert not errors_of(document, kuberay_schemas)


def test_the_kuberay_file_has_our_versions_and_requests_what_it_limits(ray_cluster):
    spec = ray_cluster["spec"]
    head, groups = spec["headGroupSpec"], spec["workerGroupSpecs"]
    containers = []
    for group in (head, *groups):
        (container,) = group["template"]["spec"]["containers"]
        containers.append(container)
        requested, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requested == limits  # nobody else's load beside a measurement
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {c["image"] for c in containers} == {f"REGISTRY/trappm:{version}"}
    pins = (ROOT / "constraints.txt").read_text().split()
    assert f"ray=={spec['rayVersion']}" in pins
    # The image leaves the memory monitor to the node groups.
    off = {"name": "RAY_memory_monitor_refresh_ms", "value": "0"}
    assert "memory_monitor" not in (ROOT / "Dockerfile").read_text() + str(head)
    assert all(off in container["env"] for container in containers[1:])


@pytest.mark.parametrize("device", ["a100", "v100"])
def test_kuberay_workers_match_the_placement_and_scale_to_zero(ray_cluster, device):
    groups = {group["groupName"]: group for group in ray_cluster["spec"]["workerGroupSpecs"]}
    group, wanted = groups[device], placement(device)
    assert wanted.suits({"Labels": group["labels"]})
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert group["minReplicas"] == group["replicas"] == 0
    (taint,) = group["template"]["spec"]["tolerations"]
    assert taint == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert "nvidia.com/gpu" not in str(ray_cluster["spec"]["headGroupSpec"]["template"])


def test_the_image_copies_existing_files_that_dockerignore_admits():
    instructions = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = {
        word for line in instructions if line.startswith("COPY ") for word in line.split()[1:-1]
    }
    assert all((ROOT / name).exists() for name in copied)
    let_in = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied == let_in
    assert instructions.index("USER trappm") > max(
        i for i, line in enumerate(instructions) if line.startswith("RUN ")
    )


# `ray_config.yaml`


@pytest.fixture
def config():
    return loaded("ray_config.yaml")


def test_the_cloud_file_is_accepted_and_sets_all_nodes_up_in_one_way(config):
    prepared = _validate(config)
    assert prepared["head_node_type"] == "head"
    types = prepared["available_node_types"]
    assert types["head"]["max_workers"] == 0
    assert "GPU" not in config["available_node_types"]["head"]["resources"]
    assert "labels" not in config["available_node_types"]["head"]
    for setup in (prepared["head_setup_commands"], prepared["worker_setup_commands"]):
        assert any("RAY_AUTH_MODE=token" in command for command in setup)
        assert any("RAY_USAGE_STATS_ENABLED=0" in command for command in setup)
        installs = [command for command in setup if "dist/trappm-" in command]
        assert installs
        assert all("-c constraints.txt" in command for command in installs)
        assert all('"$wheel[postgresql]"' in command for command in installs)
    starts = prepared["head_start_ray_commands"] + prepared["worker_start_ray_commands"]
    assert all(". /home/ubuntu/trappm/environment;" in command for command in starts)
    # One software stack, which supports the V100.
    assert not any("worker_setup_commands" in node_type for node_type in types.values())
    (torch,) = [c for c in prepared["worker_setup_commands"] if "torch torchvision" in c]
    assert "--extra-index-url https://download.pytorch.org/whl/cu126" in torch
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert (int(pinned[1]), int(pinned[2])) < (2, 15)  # without wheels of CUDA 12.6


@pytest.mark.parametrize("device", ["a100", "v100"])
def test_a_worker_group_matches_the_placement_of_its_device(config, device):
    wanted = placement(device)
    group = _validate(config)["available_node_types"][device]
    assert wanted.suits({"Labels": group["labels"]})
    # No core: a node of few cores and several GPUs measures on all of them.
    assert wanted.options == {"num_gpus": 1, "num_cpus": 0, "label_selector": group["labels"]}
    assert group["resources"]["GPU"] == 1
    assert group["min_workers"] == 0
    assert group["max_workers"] >= 1
