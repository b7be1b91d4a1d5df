"""Labels for the tests of the command line and of the Python interface."""

from trappm.profiler.records import Configuration, Measurement, Outcome, Protocol, StepSummary

DEVICE = "cpu-2t"


def measurement(
    architecture="resnet18", batch_size=1, outcome="ok", *, step_ms=10.0, input_size=64,
    settings=None,
    **fields,
):  # fmt: skip
    ok = Outcome(outcome) is Outcome.OK
    step = StepSummary(median_ms=step_ms, mean_ms=step_ms + 0.1, iqr_ms=0.5, p95_ms=step_ms + 1)
    values = {
        "configuration": Configuration(
            architecture=architecture, batch_size=batch_size, input_size=input_size,
            **(settings or {}),
        ),
        "device": DEVICE,
        "outcome": Outcome(outcome),
        "protocol": Protocol(name="quick"),
        "started_at": "2026-01-02T03:04:05.678901+00:00",
        "duration_s": 3.25,
        "step_samples_ms": (step_ms, step_ms + 0.5, step_ms + 0.25) if ok else (),
        "step": step if ok else None,
        "memory_mib": 321.123456789012 if ok else None,
        "missing": {"power_w": "no meter"},
        "failed_in": None if ok else "measure",
        "message": None if ok else f"ended as {outcome}",
        "environment": {"device": DEVICE, "torch": "2.13.0"},
    }  # fmt: skip
    return Measurement(**(values | fields))
