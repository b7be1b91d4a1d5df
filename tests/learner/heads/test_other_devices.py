"""Cards that nobody has labelled are answered for by what is known of all, and said to be."""

from functools import cache

import numpy as np
import pytest

from research.priors.other_devices import pooled_errors
from trappm.learner.heads.physics_heads import Basis, Heads, OtherDevices, known_of_others
from trappm.learner.interface import TrainedHeads, Workload
from trappm.profiler.memory.simulation import memory_of
from trappm.profiler.records import Phase, StepSettings
from trappm.profiler.trace import trace


@pytest.fixture(scope="module")
def others():
    return known_of_others()[0]


@cache
def resnet18(phase=Phase.TRAIN, batch_size=32):
    traced = trace("resnet18", 224, phase=phase)
    return Workload.of(traced, StepSettings(), batch_size=batch_size, with_kernels=True)


def medians(others, device, workload):
    answer = others.heads(device, workload.phase).heads.predict([workload])
    assert (answer.low < answer.median).all()
    assert (answer.median < answer.high).all()
    assert not answer.outside.any()
    return dict(zip(answer.metrics, answer.median[0], strict=True))


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("device", ["t4", "rtx-4060-ti"])
def test_every_gpu_of_the_catalogue_has_time_and_memory(others, device, phase):
    answer = medians(others, device, resnet18(phase))
    assert set(answer) == {"step_time_ms", "memory_mib"}
    simulated = memory_of(resnet18(phase).trace, 32)
    assert simulated.reserved_mib < answer["memory_mib"] < simulated.reserved_mib + 2000


def test_measurements_of_a_gpu_change_its_constants(others):
    assert others.basis("t4") is Basis.KERNELS
    assert others.basis("rtx-2060") is Basis.SPECIFICATION
    assert others.basis("rtx-2080-ti") is Basis.STEPS
    for key in ((Basis.KERNELS, "t4"), (Basis.STEPS, "rtx-2080-ti")):
        assert not np.allclose(others.of_cards[key], others.constants)


def test_other_devices_are_restored_from_tensors(others):
    again = OtherDevices.from_tensors(others.tensors())
    for device in ("t4", "rtx-2060"):
        first, second = (medians(o, device, resnet18()) for o in (others, again))
        assert first == second


def test_damaged_tensors_are_refused(others):
    tensors = others.tensors()
    for name in ("constants", "errors.memory.quantiles"):
        with pytest.raises(KeyError):
            OtherDevices.from_tensors({k: v for k, v in tensors.items() if k != name})
    t4, memory = "kernels.t4", "errors.memory.quantiles"
    for damage, message in (
        ({t4: tensors[t4].repeat(2)}, "constants of shape"),
        ({t4: tensors[t4] * np.nan}, "not finite"),
        ({memory: tensors[memory] * 0}, "errors between"),
    ):
        with pytest.raises(ValueError, match=message):
            OtherDevices.from_tensors({**tensors, **damage})


def test_missing_metrics_are_added_to_trained_heads(others):
    whole = others.heads("a100", Phase.TRAIN)
    memory = whole.heads.heads["memory_mib"]
    known = TrainedHeads(Heads({"memory_mib": memory}, 7), whole.settings)
    completed = others.completed(known, "a100-40gb", Phase.TRAIN)
    assert completed.heads.heads["memory_mib"] is memory
    assert completed.heads.metrics == ("step_time_ms", "memory_mib")
    assert completed.heads.label_count == 7
    assert others.completed(known, "cpu-2t", Phase.TRAIN) is known


def test_pooled_error_intervals_weight_devices_and_architectures_equally():
    """Cards, and then the architectures of each, have the same weight, whatever their labels."""
    generator = np.random.default_rng(4)
    of_cards = [generator.normal(0.02, 0.03, 300), generator.normal(0.03, 0.05, 100)]
    errors = np.concatenate([np.repeat(of_cards[0], 10), of_cards[1], np.full(1000, 0.5)])
    cards = ["many labels"] * 3000 + ["few labels"] * 1100
    names = [str(i // 10) for i in range(3000)] + [str(i) for i in range(100)] + ["99"] * 1000
    low, high = pooled_errors(errors, cards, names).interval()
    assert -0.07 < low < -0.02
    assert 0.07 < high < 0.13
    inside = [np.mean((low <= of_card) & (of_card <= high)) for of_card in of_cards]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.015)
