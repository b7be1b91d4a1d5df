"""The environment record and the fingerprint of the software stack."""

from nvml_stub import Board, install

from trappm.profiler.devices import open_device
from trappm.profiler.host.environment import stack_difference, stack_fingerprint
from trappm.profiler.records import Configuration

CONFIGURATION = Configuration(
    architecture="mobilenetv3_small_050", batch_size=2, input_size=64, optimizer="adam"
)


STACK = ("torch", "timm", "python", "device", "device_name", "driver")
CHANGING = ("host", "kernel", "utc", "load_average_before", "lock_wait_s")


def test_the_fingerprint_changes_with_the_stack_only():
    environment = open_device("cpu-1t").environment()
    for fact in (*STACK, *CHANGING):
        other = stack_fingerprint({**environment, fact: "other"})
        assert (other == stack_fingerprint(environment)) == (fact in CHANGING), fact


def on_a_gpu(monkeypatch, **board):
    install(monkeypatch, Board("GPU-a", "Tesla T4", **board))
    return open_device("cuda:0").environment()


def test_settings_and_host_change_the_stack_of_a_gpu(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    plain = on_a_gpu(monkeypatch)
    assert {*STACK, *CHANGING[:2], "tf32", "device_uuid"} <= plain.keys()
    assert stack_difference(plain, on_a_gpu(monkeypatch)) is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "1")
    switched = on_a_gpu(monkeypatch)
    assert "PYTORCH_CUDA_ALLOC_CONF" in (stack_difference(plain, switched) or "")
    for other in (
        switched,
        on_a_gpu(monkeypatch, ecc=(0, 1)),
        on_a_gpu(monkeypatch, application_clock_mhz=585),
        {**plain, "host_cpu": "a slower one"},
    ):
        assert stack_fingerprint(other) != stack_fingerprint(plain)


def test_another_memory_method_is_another_stack():
    environment = open_device("cpu-1t").environment()
    usual = {**environment, "memory_method": "nvml process memory"}
    other = {**environment, "memory_method": "nvml device memory above its baseline"}
    assert stack_fingerprint(other) != stack_fingerprint(usual)
    assert "memory_method" in (stack_difference(other, usual) or "")
    # What a device says before it measures, and a run that came to no memory, are of the usual one.
    untold = {k: v for k, v in environment.items() if k != "memory_method"}
    assert stack_fingerprint(usual) == stack_fingerprint(untold)
    assert stack_fingerprint({**usual, "memory_method": "none"}) == stack_fingerprint(untold)
