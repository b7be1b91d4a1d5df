"""Which GPUs a process may use, and by which names: the real pynvml on a stub of the driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvml_stub import GIB, Board, Machine, error, install

from trappm.profiler.devices import local_devices, open_device
from trappm.profiler.devices.gpu.nvml import visible_gpus
from trappm.profiler.errors import DeviceError


def split_board():
    name = "NVIDIA A100-SXM4-40GB MIG"
    small = Board(
        "MIG-11111111-0", f"{name} 1g.5gb", total=5 * GIB, used=GIB // 4, is_instance=True
    )
    large = Board("MIG-22222222-0", f"{name} 2g.10gb", is_instance=True)
    return Board("GPU-bbbb", mig=(1, 1), instances=[small, large])


def machine(monkeypatch, visible=None):
    """An A100, a second one that MIG splits in two, and an H100."""
    boards = (Board("GPU-aaaa"), split_board(), Board("GPU-cccc", "NVIDIA H100 80GB HBM3"))
    made = install(monkeypatch, *boards)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return made


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aaaa", "MIG-11111111-0", "MIG-22222222-0", "GPU-cccc"]),
        ("2,0", ["GPU-cccc", "GPU-aaaa"]),
        ("MIG-1,0", ["MIG-11111111-0", "GPU-aaaa"]),
        ("", []),
        ("0,-1,2", ["GPU-aaaa"]),
    ],
)
def test_visible_gpus_are_listed_by_uuid(visible, uuids, monkeypatch):
    machine(monkeypatch, visible)
    assert [gpu.uuid for gpu in visible_gpus()] == uuids
    for index, uuid in enumerate(uuids):
        assert open_device(f"cuda:{index}").environment()["device_uuid"] == uuid


@pytest.mark.parametrize(
    ("visible", "what"), [("1", "split by MIG"), ("3", "not one GPU"), ("MIG-", "not one GPU")]
)
def test_ambiguous_gpus_are_refused(visible, what, monkeypatch):
    machine(monkeypatch, visible)
    with pytest.raises(DeviceError, match=what):
        open_device("cuda:0")


def test_names_of_gpus_and_instances_are_device_keys(monkeypatch):
    machine(monkeypatch)
    keys = [key for key in local_devices() if not key.startswith("cpu-")]
    assert keys == ["a100", "a100-mig-1g.5gb", "a100-mig-2g.10gb", "h100"]
    assert open_device("h100").environment()["device_uuid"] == "GPU-cccc"
    assert open_device("a100-mig-1g.5gb").capacity_mib == 5 * 1024


def test_a_lost_gpu_keeps_its_index_and_affects_only_itself(monkeypatch):
    lost = Board("GPU-b", handle=error("GPU_IS_LOST"))
    no_permission = error("NO_PERMISSION")
    forbidden = Board("GPU-d", "NVIDIA H200", mig=(1, 1), most_instances=no_permission)
    install(monkeypatch, Board("GPU-a"), lost, Board("GPU-c", "NVIDIA H100"), forbidden)
    assert [key for key in local_devices() if not key.startswith("cpu-")] == ["a100", "h100"]
    assert open_device("cuda:2").environment()["device_uuid"] == "GPU-c"
    for key, why in (("cuda:1", "GPU is lost"), ("cuda:3", "Permission")):
        with pytest.raises(DeviceError, match=why):
            open_device(key)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert open_device("cuda:0").environment()["device_uuid"] == "GPU-c"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(DeviceError, match="GPU 1 of this machine: GPU is lost"):
        open_device("cuda:0")


NOT_ON_A_GPU_NODE = ("ray", "sqlalchemy", "alembic", "pandas", "onnx_tool")


def test_lost_gpus_are_reported_where_neither_ray_nor_sql_is_installed():
    """The command as a user runs it: pynvml finds the driver's library by itself."""
    boards = (
        Board("GPU-a", handle=error("GPU_IS_LOST")),
        Board("GPU-b", "NVIDIA H100 80GB HBM3", total=error("GPU_IS_LOST")),
        Board("GPU-c", "Tesla V100-SXM2-16GB", total=16 * GIB),
    )
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({NOT_ON_A_GPU_NODE!r}))\n"
        "import trappm.profiler.measuring.attempt\n"
        "from trappm.cli import run\n"
        "sys.exit(run(['measure', '--devices']))"
    )
    without = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**without, **Machine(*boards).variables},
        cwd=Path(__file__).parents[3],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "v100                    16.0 GiB  Tesla V100-SXM2-16GB" in done.stdout.splitlines()
    assert "cpu-1t" in done.stdout
    lost, silent = done.stderr.splitlines()
    assert lost == "NVML on GPU 0 of this machine: GPU is lost"
    assert "GPU is lost" in silent
    assert done.returncode == 1


def test_broken_drivers_are_reported(monkeypatch, command):
    install(monkeypatch, init=error("LIB_RM_VERSION_MISMATCH"))
    _, out, err = command("measure --devices")
    assert err == "NVML finds no GPU: RM has detected an NVML/RM version mismatch.\n"
    assert "cpu-1t" in out


def test_old_drivers_without_functions_are_supported(monkeypatch):
    """Without MIG, versions of structures and fields: the symbols are not there."""
    install(monkeypatch, Board("GPU-a", "Tesla V100-SXM2-16GB", used=3 * GIB), driver="418.226")
    (gpu,) = visible_gpus()
    memory = gpu.memory().value
    assert (memory.total, memory.used) == (40 * GIB, 3 * GIB)
    assert not hasattr(memory, "reserved")
    environment = open_device("v100").environment()
    assert "has no nvmlDeviceGetMigMode" in environment["untold"]["mig"]
    assert environment["driver"] == "418.226"
