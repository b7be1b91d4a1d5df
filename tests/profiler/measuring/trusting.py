"""A short protocol for tests, to which no run is unstable."""

from trappm.profiler.records import Protocol

# Other work on the machine that runs the tests must not decide how they end.
TRUSTING = Protocol(
    name="test",
    warmup_steps=1,
    min_steps=3,
    max_steps=5,
    max_seconds=1.0,
    target_relative_error=0.5,
    timeout_s=120.0,
    unstable_relative_iqr=1000.0,
    unstable_lost_share=1000.0,
)
