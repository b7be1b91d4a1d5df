"""The CUDA device on a fake NVML: everything of it that needs no GPU."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_nvml import GIB, Board, FakeNvml, Process, error, install, own

from profiler.devices import MemoryReading, Window, local_devices, open_device
from profiler.devices.cuda import _EVENT_BATCH, CudaDevice
from profiler.devices.gpu_watch import GpuWatch
from profiler.devices.nvml import visible_gpus
from profiler.environment import stack_fingerprint
from profiler.errors import DeviceError
from profiler.protocols import PAPER
from profiler.records import Configuration, Outcome
from profiler.stability import judge
from profiler.step import StepRun

MIG_1G = Board(
    "MIG-11111111-0",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    total=5 * GIB,
    used=GIB // 4,
    is_instance=True,
)
MIG_2G = Board("MIG-22222222-0", "NVIDIA A100-SXM4-40GB MIG 2g.10gb", is_instance=True)


def split_board() -> Board:
    return Board("GPU-bbbb", mig=(1, 1), instances=[MIG_1G, MIG_2G])


def machine(monkeypatch: pytest.MonkeyPatch, visible: str | None = None) -> FakeNvml:
    """An A100, a second one that MIG splits in two, and an H100."""
    boards = (Board("GPU-aaaa"), split_board(), Board("GPU-cccc", "NVIDIA H100 80GB HBM3"))
    fake = install(monkeypatch, *boards)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return fake


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aaaa", "MIG-11111111-0", "MIG-22222222-0", "GPU-cccc"]),
        ("2,0", ["GPU-cccc", "GPU-aaaa"]),
        ("GPU-c", ["GPU-cccc"]),
        ("MIG-22222222-0", ["MIG-22222222-0"]),
        ("MIG-1,0", ["MIG-11111111-0", "GPU-aaaa"]),
        ("", []),
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


def test_measurements_on_instances_of_one_gpu_keep_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    first, second = open_device("a100-mig-1g.5gb"), open_device("a100-mig-2g.10gb")
    assert first.lock_name == second.lock_name != open_device("a100").lock_name


def test_instance_has_no_meter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    window = window_on("a100-mig-1g.5gb")
    assert window.energy_j is None
    assert "shares" in (window.energy_missing or "")
    assert "shares" in window.missing["gpu_utilization"]
    assert window.facts["sm_clock_mhz"]["median"] == 1410  # its board's


def test_environment_says_what_may_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a", ecc=None, power_limit_mw=error("NO_PERMISSION")))
    environment = open_device("cuda:0").environment()
    assert environment["ecc"] is None
    assert environment["device_power_limit_w"] is None
    assert "Not Supported" in environment["untold"]["ecc"]
    assert "Permission" in environment["untold"]["device_power_limit_w"]
    assert environment["persistence"] == 1
    stack_fingerprint(environment)


def test_no_driver_and_no_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, Board("GPU-a", used=error("GPU_IS_LOST")))
    with pytest.raises(DeviceError, match="GPU is lost"):
        open_device("cuda:0")

    def no_driver() -> None:
        raise error("DRIVER_NOT_LOADED")

    monkeypatch.setattr(fake, "nvmlInit", no_driver)
    with pytest.raises(DeviceError, match="Driver Not Loaded"):
        open_device("cuda:0")
    assert all(key.startswith("cpu-") for key in local_devices())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU for torch")
def test_gpu_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a"))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # both are set by `prepare`
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(DeviceError, match="cannot use CUDA"):
        open_device("cuda:0").prepare()


def prepared(key: str) -> CudaDevice:
    """The device as after `prepare`, which itself needs CUDA."""
    device = open_device(key)
    assert isinstance(device, CudaDevice)
    device._strangers, _ = device._processes()
    device._used_before = device._gpu.ask("nvmlDeviceGetMemoryInfo")
    return device


def window_on(key: str, meanwhile: Callable[[], None] = lambda: None) -> Window:
    device = prepared(key)
    device.open_window()
    meanwhile()
    return device.close_window()


def judged(window: Window) -> Any:
    memory = MemoryReading(peak_mib=100.0, method="made up")
    samples_ms = (10.0,) * 20
    run = StepRun(samples_ms=samples_ms, window=window, steps_in_window=20, memory=memory)
    return judge(run, PAPER)


def test_energy_comes_from_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=[5_000_000, 5_600_000]))
    window = window_on("cuda:0")
    assert window.energy_j == pytest.approx(600.0)
    assert window.facts["power_method"] == "nvml total energy counter"
    assert window.facts["gpu_utilization"] == pytest.approx(0.97)
    assert window.facts["memory_utilization"] == pytest.approx(0.41)
    found = judged(window)
    assert found.outcome is Outcome.OK
    assert found.energy_j == pytest.approx(30.0)
    assert found.power_w == pytest.approx(600.0 / window.seconds)
    assert not found.missing


@pytest.mark.parametrize(
    ("counter", "why"),
    [
        ([4_294_967_000, 200_000], "fell from 4294967000 to 200000"),
        (5, "stood still"),
        (None, "Not Supported"),
        (error("NO_PERMISSION"), "Permission"),
    ],
)
def test_without_a_counter_the_power_is_polled(
    counter: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=counter, power_mw=[100_000, 300_000]))
    window = window_on("cuda:0")
    assert window.energy_j is not None
    mean_w = window.energy_j / window.seconds
    assert 200.0 <= mean_w < 300.0  # one look at 100 W, at least one at 300 W
    assert mean_w == pytest.approx(window.facts["polled_power_w"])
    assert "polled" in window.facts["power_method"]
    assert why in window.facts["power_method"]


def test_power_is_missing_without_any_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=None, power_mw=error("NO_PERMISSION")))
    found = judged(window_on("cuda:0"))
    assert found.power_w is None
    assert found.energy_j is None
    assert "Not Supported" in found.missing["power_w"]
    assert found.outcome is Outcome.OK


def test_gpu_lost_in_mid_window_is_unstable_and_keeps_the_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = Board("GPU-a", energy_mj=[1, 2])
    install(monkeypatch, board)

    def fall_off_the_bus() -> None:
        lost = error("GPU_IS_LOST")
        for name in ("energy_mj", "power_mw", "sm_clock_mhz", "temperature_c", "used"):
            setattr(board, name, lost)

    found = judged(window_on("cuda:0", fall_off_the_bus))
    assert found.outcome is Outcome.UNSTABLE
    assert "GPU is lost" in (found.message or "")
    assert found.power_w is None
    assert "GPU is lost" in found.missing["power_w"]
    assert len(found.step_samples_ms) == 20


@pytest.mark.parametrize(
    ("reasons", "unstable"),
    [(0x4, None), (0x1, None), (0x8, "hardware slowdown"), (0x20, "software thermal slowdown"),
     (0x40 | 0x4, "hardware thermal slowdown"), (0x80, "power brake")],
)  # fmt: skip
def test_slowdown_at_any_moment_of_the_window_counts(
    reasons: int, unstable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=[1, 2], reasons=[0, reasons, 0]))
    window = window_on("cuda:0")
    assert window.disturbances == (() if unstable is None else (f"{unstable} of the GPU",))
    assert len(window.facts["clock_event_reasons"]) == reasons.bit_count()


def test_clocks_and_temperatures_have_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board("GPU-a", sm_clock_mhz=[1410, 1200, 1300], temperature_c=[50, 60])
    install(monkeypatch, board)
    watch = GpuWatch(visible_gpus()[0], period_s=0.001)
    while len(watch._seen["processes"]) < 10:
        pass
    watch.stop()
    facts = watch.facts()
    assert facts["sm_clock_mhz"] == {"min": 1200, "median": 1300, "max": 1410}
    assert facts["temperature_c"]["max"] == 60
    assert watch.failure is None


@pytest.mark.parametrize(
    ("before", "during", "foreign"),
    [
        ([], [own()], 0),
        ([Process(7)], [Process(7), own()], 1),
        ([Process(7)], [own()], 0),  # it went before the window
        ([], [Process(7), own()], 1),  # it came meanwhile
        ([], [Process(7)], 0),  # a container: ours under the host's number
        ([], [], 0),
    ],
)
def test_foreign_processes_make_a_run_unstable(
    before: list[Process],
    during: list[Process],
    foreign: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = Board("GPU-a", energy_mj=[1, 2], processes=before)
    install(monkeypatch, board)
    device = prepared("cuda:0")
    board.processes = during
    device.open_window()
    window = device.close_window()
    assert window.facts["foreign_gpu_processes"] == foreign
    assert bool(window.disturbances) == bool(foreign)


def test_processes_that_may_not_be_listed_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=[1, 2], processes=error("NO_PERMISSION")))
    window = window_on("cuda:0")
    assert window.facts["foreign_gpu_processes"] is None
    assert "Permission" in window.missing["processes"]
    assert window.disturbances == ()


def torch_holds(monkeypatch: pytest.MonkeyPatch, **mib: int) -> None:
    for function, value in mib.items():
        monkeypatch.setattr(torch.cuda, function, lambda value=value: value << 20)


@pytest.mark.parametrize(
    ("processes", "peak_mib", "method"),
    [
        ([own(3 * GIB)], 3 * 1024 + 100, "nvml process memory"),
        ([Process(7, 3 * GIB)], 3 * 1024 + 100, "nvml process memory"),
        ([own(None)], 4 * 1024 + 100, "nvml device memory above its baseline"),
        ([], 4 * 1024 + 100, "nvml device memory above its baseline"),
        (error("NO_PERMISSION"), 4 * 1024 + 100, "nvml device memory above its baseline"),
    ],
)
def test_memory_has_four_numbers(
    processes: Any, peak_mib: float, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board("GPU-a", used=1 * GIB)
    install(monkeypatch, board)
    device = prepared("cuda:0")
    board.processes, board.used = processes, 5 * GIB
    # 100 MiB were given back to the device after the peak.
    torch_holds(
        monkeypatch, max_memory_allocated=1500, max_memory_reserved=2000, memory_reserved=1900
    )
    reading = device.memory()
    assert reading.peak_mib == peak_mib
    assert reading.method == method
    assert reading.detail_mib["peak_allocated"] == 1500
    assert reading.detail_mib["peak_reserved"] == 2000
    assert reading.detail_mib["device_used"] == 5 * 1024
    assert ("process_used" in reading.detail_mib) != ("process_used" in reading.missing)


def test_memory_beside_a_stranger_is_missing_when_it_cannot_be_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = Board("GPU-a", processes=[Process(7, None)])
    install(monkeypatch, board)
    device = prepared("cuda:0")
    board.processes = [Process(7, None), own(None)]
    torch_holds(
        monkeypatch, max_memory_allocated=1500, max_memory_reserved=2000, memory_reserved=2000
    )
    reading = device.memory()
    assert reading.peak_mib is None
    assert "memory of a process" in reading.missing["memory_mib"]


def test_many_steps_are_timed_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of events that moves by 2 ms a step; 1 ms is lost to each synchronisation."""
    clock = itertools.count()
    waiting: list[int] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = 2 * next(clock)
            waiting.append(self.time)

        def elapsed_time(self, later: Event) -> float:
            assert not waiting
            return float(later.time - self.time)

    def synchronize() -> None:
        assert len(waiting) <= _EVENT_BATCH + 1
        waiting.clear()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    install(monkeypatch, Board("GPU-a"))
    device = prepared("cuda:0")
    done = []
    samples_ms = device.time_steps(lambda: done.append(1), 1000)
    assert samples_ms == [2.0] * 1000
    assert len(done) == 1000
    assert device.time_parts(lambda mark: (mark(), mark(), mark())) == [2.0] * 3  # type: ignore[func-returns-value]


def test_bf16_is_refused_where_the_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a", "Tesla V100-SXM2-16GB"))
    device = prepared("v100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    bf16 = Configuration(
        architecture="resnet18",
        batch_size=1,
        input_size=64,
        precision="amp-bf16",  # type: ignore[arg-type]
    )
    fp16 = Configuration(
        architecture="resnet18",
        batch_size=1,
        input_size=64,
        precision="amp-fp16",  # type: ignore[arg-type]
    )
    assert "bf16" in (device.refusal(bf16) or "")
    assert device.refusal(fp16) is None


def test_an_old_nvml_package_lacks_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, Board("GPU-a", energy_mj=[1, 2]))
    assert isinstance(fake, types.ModuleType)
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    window = window_on("cuda:0")
    assert window.facts["clock_event_reasons"] is None
    assert "nvidia-ml-py" in window.missing["clock_event_reasons"]
