"""A GPU's energy and power over a window, on a stub of the driver's library."""

import pytest
from fake_cuda import install_cuda, judged, prepared, window_on
from nvml_stub import Board, error, install

from trappm.profiler.devices.gpu import cuda
from trappm.profiler.devices.gpu.sensors import GpuWatch
from trappm.profiler.host import procfs
from trappm.profiler.records import Outcome


@pytest.fixture(autouse=True)
def quiet_host(monkeypatch):
    """Whatever else this machine does, nothing takes cores away here."""
    monkeypatch.setattr(procfs, "run_queue_wait_s", lambda: 0.0)
    monkeypatch.setattr(procfs, "stolen_cpu_s", lambda _cores: 0.0)


def test_energy_is_read_from_the_counter(monkeypatch):
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
def test_power_is_polled_without_an_energy_counter(counter, why, monkeypatch):
    install(monkeypatch, Board("GPU-a", energy_mj=counter, power_mw=[100_000, 300_000]))
    window = window_on("cuda:0", monkeypatch)
    mean_w = window.energy_j / window.seconds
    assert 200.0 <= mean_w <= 300.0  # one look at 100 W, which may not count, and more at 300 W
    assert mean_w == pytest.approx(window.facts["polled_power_w"])
    assert "polled" in window.facts["power_method"]
    assert why in window.facts["power_method"]


def test_the_window_begins_with_a_busy_gpu_and_a_counter_tick(monkeypatch):
    """A counter that moves when it is asked for the fourth time."""
    order = []
    install(monkeypatch, Board("GPU-a", energy_mj=[5, 5, 5, 6, 7]))
    install_cuda(monkeypatch)
    device = prepared("cuda:0", monkeypatch)
    monkeypatch.setattr(cuda, "GpuWatch", lambda gpu: (order.append("watch"), GpuWatch(gpu))[1])
    device.open_window(lambda: order.append("step"))
    assert order == ["watch", "step", "step", "step"]
    assert device.close_window().energy_j == pytest.approx(0.001)


def test_the_energy_window_ends_with_a_counter_tick(monkeypatch):
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
