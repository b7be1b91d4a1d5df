"""A GPU's energy and power over a window, on a stub of the driver's library."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import install_cuda, prepared
from nvml_stub import Board, error, install
from test_cuda_without_gpu import judged, window_on

from trappm.profiler.devices.gpu import cuda
from trappm.profiler.devices.gpu.cuda import CudaDevice
from trappm.profiler.devices.gpu.sensors import GpuWatch
from trappm.profiler.host import procfs
from trappm.profiler.records import Outcome


@pytest.fixture(autouse=True)
def quiet_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine does, nothing takes cores away here."""
    monkeypatch.setattr(procfs, "run_queue_wait_s", lambda: 0.0)
    monkeypatch.setattr(procfs, "stolen_cpu_s", lambda _cores: 0.0)


def test_energy_comes_from_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=[4_990_000, 5_000_000, 5_600_000]))
    window = window_on("cuda:0", monkeypatch)
    assert window.energy_j == pytest.approx(600.0)
    assert window.facts["power_method"] == "nvml total energy counter"
    assert window.facts["gpu_utilization"] == pytest.approx(0.97)
    assert window.facts["memory_utilization"] == pytest.approx(0.41)
    measurement = judged(window)
    assert measurement.outcome is Outcome.OK
    assert measurement.energy_j == pytest.approx(30.0)
    assert measurement.power_w == pytest.approx(600.0 / window.seconds)
    assert measurement.missing.keys() == {"foreign_gpu_processes"}


@pytest.mark.parametrize(
    ("counter", "why"),
    [
        ([4_294_966_000, 4_294_967_000, 200_000], "fell from 4294967000 to 200000"),
        (5, "stood still"),
        (None, "Not Supported"),
        (error("NO_PERMISSION"), "Permission"),
    ],
)
def test_without_a_counter_the_power_is_polled(
    counter: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=counter, power_mw=[100_000, 300_000]))
    window = window_on("cuda:0", monkeypatch)
    assert window.energy_j is not None
    mean_w = window.energy_j / window.seconds
    assert 200.0 <= mean_w <= 300.0  # one look at 100 W, which may not count, and more at 300 W
    assert mean_w == pytest.approx(window.facts["polled_power_w"])
    assert "polled" in window.facts["power_method"]
    assert why in window.facts["power_method"]


def test_polled_power_is_that_of_the_moment_where_the_driver_tells_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=None, power_mw=90_000, power_instant_mw=310_000))
    window = window_on("cuda:0", monkeypatch)
    assert window.facts["polled_power_w"] == pytest.approx(310.0)
    assert window.facts["power_method"].startswith("nvml instant power, polled")


def test_watch_is_built_and_the_gpu_busy_before_the_window_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A counter that moves when it is asked for the fourth time."""
    order: list[str] = []
    install(monkeypatch, Board("GPU-a", energy_mj=[5, 5, 5, 6, 7]))
    install_cuda(monkeypatch)
    device = prepared("cuda:0", monkeypatch)
    monkeypatch.setattr(cuda, "GpuWatch", lambda gpu: (order.append("watch"), GpuWatch(gpu))[1])
    device.open_window(lambda: order.append("step"))
    assert order == ["watch", "step", "step", "step"]
    assert device.close_window().energy_j == pytest.approx(0.001)


def test_nobody_waits_for_a_meter_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=[5, 5, 5, 6, 7]))
    install_cuda(monkeypatch)
    device = prepared("cuda:0", monkeypatch)
    order: list[str] = []
    device.open_window(lambda: order.append("step"), is_metered=False)
    assert order == []
    device.close_window()


def test_pauses_shift_the_steps_and_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=[1, 2, 10_000]))
    install_cuda(monkeypatch)
    device = prepared("cuda:0", monkeypatch)
    slept: list[float] = []
    parts: list[int] = []
    now = itertools.count()  # a clock that moves by a second at each look
    clock = SimpleNamespace(perf_counter=lambda: float(next(now)), sleep=slept.append)
    monkeypatch.setattr(cuda, "time", clock)
    monkeypatch.setattr(CudaDevice, "time_steps", lambda _, step, count: parts.append(count))
    device.open_window(lambda: None)
    device.fill_window(lambda: None, 20, random.Random(0))
    window = device.close_window()
    assert parts == [3, 3, 3, 3, 2, 2, 2, 2]
    assert len({*slept}) == 8
    assert 0 <= min(slept) <= max(slept) <= 0.025
    assert window.facts["paused_s"] == 8.0
    assert window.seconds == 9.0  # 17 looks at the clock since the window began, 8 pauses
    device.fill_window(lambda: None, 1, random.Random(0))
    assert parts[8:] == [1]


def test_power_is_missing_without_any_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=None, power_mw=error("NO_PERMISSION")))
    measurement = judged(window_on("cuda:0", monkeypatch))
    assert measurement.power_w is None
    assert measurement.energy_j is None
    assert "Not Supported" in measurement.missing["power_w"]
    assert measurement.outcome is Outcome.OK


def test_energy_window_begins_and_ends_with_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that grows by 100 J every fifth time that it is asked."""
    counts = [100_000 * (reading // 5) for reading in range(3, 400)]
    install(monkeypatch, Board("GPU-a", energy_mj=counts))
    install_cuda(monkeypatch)
    device = prepared("cuda:0", monkeypatch)
    device.open_window(lambda: None)
    done = []
    device.run_to_tick(lambda: done.append(1))
    window = device.close_window()
    assert len(done) == 4  # asked once more when the window opened
    assert window.energy_j == pytest.approx(100.0)


def test_waiting_for_a_counter_that_stands_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=5))
    install_cuda(monkeypatch)
    device = prepared("cuda:0", monkeypatch)
    done = []
    device.run_to_tick(lambda: done.append(1))
    assert done
    install(monkeypatch, Board("GPU-a", energy_mj=None))
    device = prepared("cuda:0", monkeypatch)
    done = []
    device.run_to_tick(lambda: done.append(1))
    assert not done
