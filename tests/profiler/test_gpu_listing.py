"""Which GPUs a process may use, and by which names: the real pynvml on a stub of the driver."""

from __future__ import annotations

import pytest
from nvml_stub import GIB, Board, Machine, error, install

from trappm.profiler.devices import local_devices, open_device
from trappm.profiler.devices.nvml import visible_gpus
from trappm.profiler.errors import DeviceError


def split_board() -> Board:
    name = "NVIDIA A100-SXM4-40GB MIG"
    small = Board(
        "MIG-11111111-0", f"{name} 1g.5gb", total=5 * GIB, used=GIB // 4, is_instance=True
    )
    large = Board("MIG-22222222-0", f"{name} 2g.10gb", is_instance=True)
    return Board("GPU-bbbb", mig=(1, 1), instances=[small, large])


def machine(monkeypatch: pytest.MonkeyPatch, visible: str | None = None) -> Machine:
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
        ("GPU-c", ["GPU-cccc"]),
        ("MIG-22222222-0", ["MIG-22222222-0"]),
        ("MIG-1,0", ["MIG-11111111-0", "GPU-aaaa"]),
        ("", []),
        ("-1", []),
        ("0,-1,2", ["GPU-aaaa"]),
    ],
)
def test_visible_gpus_are_known_by_uuid(
    visible: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, visible)
    assert [gpu.uuid for gpu in visible_gpus()] == uuids
    for index, uuid in enumerate(uuids):
        assert open_device(f"cuda:{index}").environment()["device_uuid"] == uuid


@pytest.mark.parametrize(
    ("visible", "what"), [("1", "split by MIG"), ("3", "not one GPU"), ("MIG-", "not one GPU")]
)
def test_what_is_not_one_gpu_is_refused(
    visible: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, visible)
    with pytest.raises(DeviceError, match=what):
        open_device("cuda:0")


def test_names_of_gpus_and_instances_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    keys = [key for key in local_devices() if not key.startswith("cpu-")]
    assert keys == ["a100", "a100-mig-1g.5gb", "a100-mig-2g.10gb", "h100"]
    assert open_device("h100").environment()["device_uuid"] == "GPU-cccc"
    assert open_device("a100-mig-1g.5gb").capacity_mib == 5 * 1024


def test_lost_gpu_keeps_its_place_and_troubles_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
