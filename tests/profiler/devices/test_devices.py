"""Devices: which there are, what the CPU's meters read, and how GPUs are named."""

import json
import os
import subprocess
import sys

import pytest

from trappm.profiler.devices import open_device
from trappm.profiler.devices.cpu import CpuDevice
from trappm.profiler.errors import DeviceError

CORES = len(os.sched_getaffinity(0))


def in_a_new_process(code):
    """What the code leaves in `answer`; preparing a device is for a process that then ends."""
    program = f"import json\n{code}\nprint(json.dumps(answer))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("key", ["cpu-0t", "cpu-t", "cpu-1", "cpu--1t", f"cpu-{CORES + 1}t", ""])
def test_devices_of_other_machines_are_refused_with_those_here(key):
    with pytest.raises(DeviceError, match="this machine has cpu-1t"):
        open_device(key)


@pytest.fixture(scope="module")
def measured():
    """Facts, memory and lost time of this machine's cores, from one process of its own."""
    return in_a_new_process(
        "import os, signal, time, torch\n"
        "from trappm.profiler.devices import open_device\n"
        "kept = torch.ones(200 << 20, dtype=torch.uint8)\n"  # before the baseline: not counted
        f"device = open_device('cpu-{CORES}t')\n"
        "answer = {'facts': device.prepare(), 'threads': torch.get_num_threads(),\n"
        "          'cores': sorted(os.sched_getaffinity(0)), 'capacity': device.capacity_mib}\n"
        "device.watch_memory()\n"
        "large = torch.ones(100 << 20, dtype=torch.uint8)\n"
        "del large\n"  # freed, but the peak remembers
        "small = torch.ones(30 << 20, dtype=torch.uint8)\n"
        "answer['peak'] = device.memory().peak_mib\n"
        "device = open_device('cpu-1t')\n"
        "os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])\n"
        "rivals = []\n"
        "for _ in range(3):\n"  # on the same core
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        while True: pass\n"
        "    rivals.append(pid)\n"
        "device.open_window(lambda: None)\n"
        "end = time.monotonic() + 0.4\n"
        "while time.monotonic() < end: pass\n"
        "answer['lost'] = device.close_window().lost_share\n"
        "for pid in rivals: os.kill(pid, signal.SIGKILL)\n"
    )


def test_cpu_devices_use_their_number_of_threads(measured):
    facts = measured["facts"]
    assert measured["threads"] == facts["threads"] == CORES
    assert measured["cores"] == facts["pinned_cores"]
    assert len(facts["pinned_cores"]) == CORES
    assert facts["omp_num_threads_found"] == "1"
    assert measured["capacity"] == pytest.approx(facts["memory_limit_mib"], abs=0.1)


def test_cpu_memory_is_the_peak_above_the_baseline(measured):
    assert measured["peak"] == pytest.approx(100.0, abs=10.0)


def test_lost_processor_time_is_detected(measured):
    if measured["lost"] is None:
        pytest.skip("this kernel keeps no scheduler statistics")
    assert measured["lost"] > 0.4


NAMES = {
    "intel-rapl:0": "package-0", "intel-rapl:1": "package-1", "intel-rapl:0:0": "core",
    "intel-rapl:2": "psys",
}  # fmt: skip


def fake_powercap(root, *energies_uj):
    for (folder, name), energy_uj in zip(NAMES.items(), energies_uj, strict=True):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "name").write_text(f"{name}\n", encoding="ascii")
        (root / folder / "energy_uj").write_text(f"{energy_uj}\n", encoding="ascii")
        (root / folder / "max_energy_range_uj").write_text("10000000\n", encoding="ascii")


def test_energy_is_summed_over_packages_and_counter_overflows(tmp_path):
    fake_powercap(tmp_path, 9_000_000, 1_000_000, 5, 7)
    device = CpuDevice("cpu-1t", powercap=tmp_path)
    device.open_window(lambda: None)
    fake_powercap(tmp_path, 500_000, 1_250_000, 9_999_999, 9_999_999)  # the first has wrapped
    window = device.close_window()
    assert window.energy_j == pytest.approx(1.75)
    assert window.energy_missing is None
