"""The order of a run, steps whose gradients overflow in fp16, and steps under `torch.compile`."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from trappm.profiler.devices import MemoryReading, Window
from trappm.profiler.devices.cpu import CpuDevice
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.records import (
    QUICK,
    Configuration,
    Execution,
    MemoryFormat,
    Optimizer,
    Outcome,
    Phase,
    Precision,
    Protocol,
)
from trappm.profiler.steps import compiling
from trappm.profiler.steps import step as step_module
from trappm.profiler.steps.sampling import judge, unstable_reasons
from trappm.profiler.steps.step import make_step, run_protocol


def tiny(**changes):
    fields = {"architecture": "mobilenetv3_small_050", "batch_size": 2, "input_size": 32}
    return Configuration(**{**fields, **changes})


class Recorded(CpuDevice):
    """A device that times nothing, and remembers what the optimizer had at each turn."""

    def __init__(self, optimizers):
        super().__init__("cpu-1t")
        self.optimizers = optimizers
        self.states_at_memory = 0
        self.warmup_steps = 0
        self.steps = 0

    def time_steps(self, step, count):
        self.steps += count
        for _ in range(count):
            step()
        return [10.0] * count

    def thread_waits_ns(self):
        return {}

    def memory(self):
        self.states_at_memory = sum(len(o.state) for o in self.optimizers)
        self.steps_for_memory = self.steps
        return MemoryReading(peak_mib=1.0, method="none")

    def open_window(self, step, *, is_metered=True):
        self.warmup_steps = self.steps - self.steps_for_memory

    def run_to_tick(self, step):
        step()

    def close_window(self):
        return Window(seconds=1.0, energy_j=5.0)


class Overflowing(torch.nn.Module):
    """A model whose gradients, scaled by 65,536 as is usual, overflow in fp16; or always do."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.num_classes, self.gain = 10, gain
        self.head = torch.nn.Linear(3, 10)

    def forward(self, images):
        logits = self.head(images.mean((2, 3)))
        # The gradient of the sum is 1 for each class, and does not vanish.
        return logits * self.gain


FEW = Protocol(name="few", warmup_steps=1, min_steps=3, max_steps=3)


def run_recorded(monkeypatch, model, **changes):
    optimizers = []
    really_make = step_module._optimizer

    def make(model, kind):
        optimizers.append(really_make(model, kind))
        return optimizers[-1]

    monkeypatch.setattr(step_module, "_optimizer", make)
    monkeypatch.setattr(step_module, "create_model", lambda *_: model)
    device = Recorded(optimizers)
    fields = {"optimizer": Optimizer.ADAM, "precision": Precision.AMP_FP16, **changes}
    return run_protocol(tiny(**fields), device, FEW, lambda _: None), device


def test_memory_is_read_after_finite_gradients_and_optimizer_states(monkeypatch):
    """With this scale the first steps are left out."""
    monkeypatch.setattr(step_module, "_FIRST_SCALE", 2.0**20)
    model = Overflowing()
    run, device = run_recorded(monkeypatch, model)
    assert device.steps_for_memory > 2
    assert device.states_at_memory == len(list(model.parameters()))
    assert run.window.disturbances == ()


def test_models_without_finite_gradients_are_unsupported(monkeypatch):
    with pytest.raises(UnsupportedModelError, match=r"amp-fp16, whatever .* by \(40 steps tried\)"):
        run_recorded(monkeypatch, Overflowing(gain=float("inf")))


def test_skipped_optimizer_steps_are_disturbances(monkeypatch):
    class Late(Overflowing):
        """Overflows from its fifth step on: two for the memory, one of warm-up, one timed."""

        steps = 0

        def forward(self, images):
            self.steps += 1
            self.gain = float("inf") if self.steps > 4 else 1.0
            return super().forward(images)

    run, _ = run_recorded(monkeypatch, Late())
    assert run.window.disturbances == (
        "3 optimizer steps were left out, as gradients overflowed",
    )  # two timed ones and the one up to the tick of the meter
    assert run.steps_in_window == 4


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.MOMENTUM, Optimizer.ADAMW])
def test_optimizers_keep_the_states_of_their_kind(monkeypatch, optimizer):
    model = Overflowing()
    _, device = run_recorded(monkeypatch, model, optimizer=optimizer)
    kept = [t for state in device.optimizers[0].state.values() for t in state.values()]
    states = [t for t in kept if isinstance(t, torch.Tensor) and t.dim()]  # but counts of steps
    assert len(states) == optimizer.states_per_parameter * len(list(model.parameters()))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.AMP_BF16])
def test_a_precision_decides_about_autocast_and_types(monkeypatch, precision):
    seen = set()

    class Seeing(Overflowing):
        def forward(self, images):
            seen.add((torch.is_autocast_enabled("cpu"), images.dtype))
            return super().forward(images)

    run_recorded(monkeypatch, Seeing(), precision=precision)
    of_images = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    assert seen == {(precision is Precision.AMP_BF16, of_images)}


def test_slow_devices_warm_up_longer(monkeypatch):
    clock = itertools.count(100.0, 0.125)
    monkeypatch.setattr(step_module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(Recorded, "min_warmup_s", 0.5)
    _, device = run_recorded(monkeypatch, Overflowing())
    assert device.warmup_steps == FEW.warmup_steps + 3 * step_module._WARMUP_BATCH


def test_noise_and_drift_are_reasons_of_an_unstable_run():
    window = Window(seconds=1.0, energy_j=None, energy_missing="no meter")
    for first, second, words in ((10.0, 20.0, "longer by 67%"), (20.0, 10.0, "shorter by 67%")):
        *_, reason = unstable_reasons([first] * 5 + [second] * 5, window, Protocol())
        assert f"drift: steps of the second half were {words}" in reason
    (reason,) = unstable_reasons([10.0, 20.0] * 10, window, Protocol(unstable_relative_iqr=0.25))
    assert "noise" in reason


def test_a_step_without_power_is_not_run_for_the_meter(monkeypatch):
    monkeypatch.setattr(Recorded, "power_window_s", lambda *_: 0.2)
    with_power, _ = run_recorded(monkeypatch, Overflowing())
    few = replace(FEW, power_share=0.0)
    monkeypatch.setitem(globals(), "FEW", few)
    without, _ = run_recorded(monkeypatch, Overflowing())
    assert (with_power.steps_in_window, without.steps_in_window) == (21, 3)
    assert without.samples == with_power.samples
    label = judge(without, few)
    assert (label.outcome, label.power_w, label.energy_j) == (Outcome.OK, None, None)
    assert label.missing["power_w"] == "protocol few measures the power of 0% only"


def test_images_are_created_on_the_device(monkeypatch):
    """On the meta device, a batch that no host could hold."""
    seen = []

    class Spy(Overflowing):
        def forward(self, images):
            seen.append(images)
            return super().forward(images)

    monkeypatch.setattr(step_module, "create_model", lambda *_: Spy())
    monkeypatch.setattr(torch, "Generator", lambda _: SimpleNamespace(manual_seed=lambda _: None))
    huge = tiny(batch_size=500_000, input_size=10_000, memory_format=MemoryFormat.CHANNELS_LAST)
    make_step(huge, torch.device("meta"))()
    assert seen[0].device.type == "meta"
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


PATIENT = replace(QUICK, max_seconds=1000.0)
"""For devices whose steps take no real time, on however busy a machine."""


class Contended(Recorded):
    """A device on which others take a share of every other step's time."""

    def __init__(self, lost_ms):
        super().__init__([])
        self.lost_ms = lost_ms
        self.readings = 0

    def time_steps(self, step, count):
        self.steps += count
        step()
        return [10.0 + self.lost_ms * (self.readings % 2)] * count

    def thread_waits_ns(self):
        self.readings += 1
        return {"1": int(self.lost_ms * 1e6) * (self.readings // 2)}

    def close_window(self):
        return Window(seconds=1.0, energy_j=5.0, lost_share=0.4)


@pytest.mark.parametrize("lost_ms", [0.0, 40.0])
def test_enough_clean_steps_make_a_run_valid_but_not_its_energy(lost_ms):
    found = judge(run_protocol(tiny(), Contended(lost_ms), PATIENT, lambda _: None), PATIENT)
    assert found.outcome is Outcome.OK, found.message
    assert found.step.median_ms == pytest.approx(10.0)
    assert (found.environment["steps_rejected"] > 0) == (lost_ms > 0)
    assert (found.power_w is None) == (lost_ms > 0)
    assert ("others used the cores" in found.missing.get("power_w", "")) == (lost_ms > 0)


@pytest.mark.parametrize(
    ("lost_ms", "reason"),
    [
        (30, "contention: others had its cores for 30% or more of every step"),
        (5, None),
    ],
)  # fmt: skip
def test_runs_without_clean_steps_are_unstable(lost_ms, reason):
    class Starved(Contended):
        def time_steps(self, step, count):
            step()
            return [100.0] * count

        def thread_waits_ns(self):
            self.readings += 1
            return {"1": int(lost_ms * 1e6) * self.readings}

    impatient = replace(QUICK, max_seconds=0.0)
    found = judge(run_protocol(tiny(), Starved(0.0), impatient, lambda _: None), impatient)
    assert found.outcome is (Outcome.OK if reason is None else Outcome.UNSTABLE)
    assert found.message == reason


# Under `torch.compile`; dynamo is real, and the compiler behind it is replaced.


def run(monkeypatch, model, backend="eager", **changes):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(step_module, "create_model", lambda *_: model)
    configuration = tiny(execution=Execution.COMPILE, **changes)
    return run_protocol(configuration, Recorded([]), FEW, lambda _: None)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_compiled_step_has_facts_of_its_compilation(monkeypatch, phase):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    facts = run(monkeypatch, Overflowing(), backend, phase=phase).window.facts
    assert len(graphs) == 1
    assert (facts["graph_breaks"], facts["recompilations"]) == (0, 0)
    assert facts["compile_s"] > 0


def test_the_cache_of_an_attempt_is_empty(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    (tmp_path / "cache" / "old").mkdir(parents=True)
    compiling.use_empty_cache(tmp_path / "cache")
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    assert cache_dir() == str(tmp_path / "cache")
    assert triton_cache_dir(0).startswith(str(tmp_path / "cache"))
    assert [*(tmp_path / "cache").glob("old")] == []
