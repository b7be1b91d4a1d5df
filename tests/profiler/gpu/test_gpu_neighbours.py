"""Who else is on the GPU, and whose memory it is that NVML counts: a stub of NVML, a fake CUDA."""

import os

import pytest
from fake_cuda import install_cuda, prepared, window_of
from nvml_stub import GIB, Board, Process, error, install, own


@pytest.fixture
def cuda(monkeypatch):
    return install_cuda(monkeypatch)


def on(board, monkeypatch):
    install(monkeypatch, board)
    return prepared("cuda:0", monkeypatch)


@pytest.mark.parametrize(
    ("before", "during", "foreign"),
    [
        ([], [own()], 0),
        ([Process(7)], [own()], 0),  # it went before the window
        ([], [Process(7), own()], 1),  # it came meanwhile
        ([], [Process(7)], 0),  # a container: ours under the host's number
        ([Process(7)], [Process(7)], 1),  # a container: ours is not listed
        ([], [], None),
    ],
)
def test_foreign_processes_make_a_run_unstable(before, during, foreign, cuda, monkeypatch):
    board = Board("GPU-a", processes=before)
    device = on(board, monkeypatch)
    board.processes = during
    window = window_of(device)
    assert window.facts["foreign_gpu_processes"] == foreign
    assert ("foreign_gpu_processes" in window.missing) == (foreign is None)
    assert bool(window.disturbances) == bool(foreign)


@pytest.mark.parametrize(
    ("used_mib", "reserved", "is_stranger"),
    [
        (4, 600 << 20, False),
        (500, 600 << 20, True),  # the smallest of contexts
        (700, None, False),  # an old driver: its own reserve counts as used
    ],
)
def test_memory_used_before_the_run_belongs_to_others(
    used_mib, reserved, is_stranger, cuda, monkeypatch
):
    board = Board("GPU-a", used=used_mib << 20, reserved=reserved)
    device = on(board, monkeypatch)
    board.used = (used_mib << 20) + 3 * GIB
    reading = device.memory()
    window = window_of(device)
    assert window.facts["foreign_gpu_processes"] is None
    assert bool(window.disturbances) == is_stranger
    assert (reading.peak_mib is None) == is_stranger
    assert ("not listed" in reading.missing.get("memory_mib", "")) == is_stranger


@pytest.mark.parametrize(
    ("processes", "peak_mib", "method"),
    [
        ([own(3 * GIB)], 3 * 1024 + 100, "nvml process memory"),
        ([own(None)], 3328 + 100, "nvml device memory above its baseline"),
        # Less than the 1900 MiB that torch alone has: the driver does not really tell.
        ([own(GIB)], 3328 + 100, "nvml device memory above its baseline"),
        ([], 3328 + 100, "nvml device memory above its baseline"),
        (error("NO_PERMISSION"), None, "none"),
        # Two are new, and NVML tells which is ours, or only that one is.
        ([Process(7, 9 * GIB), own(3 * GIB)], 3 * 1024 + 100, "nvml process memory"),
        ([Process(7, 9 * GIB), own(None)], None, "none"),
        ([Process(7, 9 * GIB), Process(8, 3 * GIB)], None, "none"),
    ],
)
def test_memory_is_measured_in_four_ways(processes, peak_mib, method, cuda, monkeypatch):
    board = Board("GPU-a")
    device = on(board, monkeypatch)
    board.processes, board.used = processes, 3328 << 20
    reading = device.memory()  # 100 MiB were given back to the device after the peak
    assert reading.peak_mib == peak_mib
    assert reading.method == method
    assert reading.detail_mib["peak_allocated"] == 1500
    assert reading.detail_mib["peak_reserved"] == 2000
    assert reading.detail_mib["device_used"] == 3328
    assert reading.detail_mib["capacity"] == cuda.total
    assert ("process_used" in reading.detail_mib) != ("process_used" in reading.missing)
    assert (peak_mib is None) == ("memory_mib" in reading.missing)


def test_processes_with_equal_ids_in_containers_are_distinguished(cuda, monkeypatch):
    """In a container, where NVML shows the host's ids, which may be ours by chance."""
    stranger = Process(os.getpid(), 30 * GIB)
    board = Board("GPU-a", processes=[stranger], used=31 * GIB)
    device = on(board, monkeypatch)
    board.processes = [stranger, Process(54321, 3 * GIB)]
    assert device.memory().peak_mib == 3 * 1024 + 100


@pytest.mark.parametrize("tenant_mib", [800, 22_000])
def test_memory_of_a_late_tenant_is_not_attributed(tenant_mib, cuda, monkeypatch):
    """In a container that lists nobody: torch has 1900 MiB, a context takes 760."""
    board = Board("GPU-a")
    device = on(board, monkeypatch)
    board.used = (1900 + 760 + tenant_mib) << 20
    reading = device.memory()
    assert reading.peak_mib is None
    assert "too much to be ours alone" in reading.missing["memory_mib"]


@pytest.mark.parametrize(
    ("reserved_mib", "used_mib", "is_disturbed"),
    [(500, 500, False), (0, 60, False), (0, 70, True), (0, -70, True)],
)  # fmt: skip
def test_memory_outside_of_torch_may_not_change_in_a_window(
    reserved_mib, used_mib, is_disturbed, cuda, monkeypatch
):
    """In a container that lists nobody: a tenant comes or goes while steps are timed."""
    board = Board("GPU-a")
    device = on(board, monkeypatch)
    board.used = 2660 << 20
    device.open_window(lambda: None)
    board.used = (2660 + used_mib) << 20
    cuda.memory_reserved += reserved_mib
    window = device.close_window()
    assert any("outside of torch" in what for what in window.disturbances) == is_disturbed


@pytest.mark.parametrize(
    ("before", "later", "used_before", "shared"),
    [
        ([], [], 0, False),
        (error("NO_PERMISSION"), error("NO_PERMISSION"), 0, False),
        ([Process(7)], [Process(7), own()], 34 * GIB, True),
        ([], [Process(7), own()], 0, True),
        ([], [], 34 * GIB, True),
    ],
)
def test_capacity_on_a_shared_gpu_is_what_is_free(
    before, later, used_before, shared, cuda, monkeypatch
):
    board = Board("GPU-a", processes=before, used=used_before)
    device = on(board, monkeypatch)
    board.processes = later
    cuda.free, cuda.memory_reserved = 100, 5000
    whole = {"capacity": cuda.total}
    expected = {"capacity": 5100, "device_memory": cuda.total} if shared else whole
    assert device.memory_limits_mib() == expected
