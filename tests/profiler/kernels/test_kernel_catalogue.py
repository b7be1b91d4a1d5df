"""The catalogue of kernels: as large as it may be, within memory, and of every kind there is."""

import pytest

from trappm.profiler.kernels.kernel_call import DataType, Operator
from trappm.profiler.kernels.kernel_choice import Abilities, catalogue, metered
from trappm.profiler.kernels.running import kernel_profile_of
from trappm.profiler.simulation.kernel_profile import KernelKind, Pass, Size

DEVICES = {
    "cpu": Abilities(memory_mib=20_000, is_cpu=True),
    "cpu with bf16": Abilities(
        memory_mib=20_000, is_cpu=True, data_types=(DataType.FP32, DataType.BF16)
    ),
    "v100": Abilities(memory_mib=16_000, data_types=(DataType.FP32, DataType.FP16)),
    "a100": Abilities(memory_mib=40_000, data_types=tuple(DataType), has_tf32=True),
    "small card": Abilities(memory_mib=2_000, data_types=(DataType.FP32, DataType.FP16)),
}


@pytest.fixture(params=DEVICES, ids=str, scope="module")
def abilities(request):
    return DEVICES[request.param]


def test_the_catalogue_has_150_to_300_distinct_calls(abilities):
    calls = catalogue(abilities)
    assert 150 <= len(calls) <= 300
    assert len(set(calls)) == len(calls)


def test_the_catalogue_covers_all_kernel_kinds(abilities):
    """But for what is unknown to us, and casts where nothing is computed in 16 bits."""
    calls = catalogue(abilities)
    kinds, passes = set(), set()
    for call in calls:
        table = kernel_profile_of(call).train
        kinds |= set(table.kinds.tolist())
        convolutions = table.kinds <= KernelKind.DEPTHWISE
        passes |= set(zip(table.kinds[convolutions], table.passes[convolutions], strict=True))
    without = {KernelKind.OTHER} | ({KernelKind.CAST} if len(abilities.data_types) == 1 else set())
    assert kinds >= set(KernelKind) - without
    assert passes == {(kind, which) for kind in list(KernelKind)[:4] for which in Pass}
    operators = {call.operator for call in calls}
    assert {Operator.SGD, Operator.MOMENTUM, Operator.ADAM, Operator.LAUNCH} <= operators


def test_each_data_type_has_a_peak(abilities):
    calls = catalogue(abilities)
    assert {c.data_type for c in calls} == set(abilities.data_types)
    peaks = {c.data_type for c in calls if c.operator is Operator.MATMUL and c["rows"] >= 1024}
    assert peaks == set(abilities.data_types)


def test_calls_use_at_most_half_of_the_memory(abilities):
    for call in catalogue(abilities):
        sizes = kernel_profile_of(call).at(call.batch_size).sizes
        moved = sizes[:, : Size.WRITTEN_BYTES + 1].sum(1).max(initial=0.0)
        assert moved <= 0.5 * abilities.memory_mib * 2**20, call


def test_every_operator_has_a_metered_call(abilities):
    calls = catalogue(abilities)
    chosen = metered(calls)
    assert {c.operator for c in chosen} == {c.operator for c in calls}
    assert len(chosen) < len(calls) / 2
