"""How much memory a device has before anything was measured on it."""

import pytest

from trappm.profiler.devices.catalogue import expected_memory_mib, memory_mib
from trappm.profiler.host import procfs


@pytest.mark.parametrize(
    ("device", "mib"),
    [
        ("a100", 40_536.0),
        ("a100-80gb", 81_251.0),
        ("a100-mig-1g.5gb", 5 * 1024.0),
        ("a100-80gb-mig-2g.20gb", 20 * 1024.0),
        ("v100", 16_160.0),
        ("v100-32gb", 32_510.0),
        ("simulated:v100", 16_160.0),
    ],
)
def test_a_gpu_is_known_by_its_name(device, mib):
    assert memory_mib(device) == expected_memory_mib(device) == mib


def test_cores_have_the_memory_of_their_host_and_unknown_devices_none():
    assert expected_memory_mib("cpu-2t") == procfs.allowed_memory_mib()
    assert memory_mib("cpu-2t") is None
    assert expected_memory_mib("gaudi2") is None
    assert expected_memory_mib("replay:labels.jsonl") is None
