"""Files that start clusters, as far as they can be checked without the cluster.

`ray up` has no dry run; the validation is private to Ray, but it is what `ray up` itself calls.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
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
def test_files_have_no_secrets(name):
    assert not CHARACTERS_OF_A_SECRET.search((ROOT / name).read_text())


def test_ray_accepts_the_on_premises_file_and_refuses_an_unknown_key():
    on_premises = loaded("ray_config_on_premises.yaml")
    _validate(on_premises)
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


@pytest.mark.parametrize("device", ["a100", "v100"])
def test_kuberay_workers_match_the_placement_of_their_device(kuberay_documents, device):
    groups = kuberay_documents["RayCluster"]["spec"]["workerGroupSpecs"]
    (group,) = [group for group in groups if group["groupName"] == device]
    assert placement(device).suits({"Labels": group["labels"]})


@pytest.mark.parametrize("device", ["a100", "v100"])
def test_ray_accepts_the_cloud_file_and_a_worker_group_matches_its_placement(device):
    wanted = placement(device)
    group = _validate(loaded("ray_config.yaml"))["available_node_types"][device]
    assert wanted.suits({"Labels": group["labels"]})
    # No core: a node of few cores and several GPUs measures on all of them.
    assert wanted.options == {"num_gpus": 1, "num_cpus": 0, "label_selector": group["labels"]}
