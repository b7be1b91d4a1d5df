"""Kernel calls, what the recorder makes of them, and the catalogue of kernels."""

import numpy as np
import pytest
import torch

from trappm.profiler.errors import InputError
from trappm.profiler.kernels.kernel_call import FORMS, DataType, Direction, KernelCall, Operator
from trappm.profiler.kernels.kernel_choice import Abilities, catalogue, metered
from trappm.profiler.kernels.running import PreparedCall, kernel_profile_of, tf32_allowed
from trappm.profiler.records import MemoryFormat
from trappm.profiler.simulation.kernel_profile import KernelKind, Pass, Size

SIZES = {
    "batch": 4, "rows": 16, "inputs": 64, "outputs": 32, "depth": 8, "columns": 24, "height": 14,
    "window": 3, "stride": 2, "groups": 1, "channels": 16, "width": 64, "heads": 2, "length": 16,
    "entries": 100, "tensors": 3, "elements": 10, "kernels": 5,
}  # fmt: skip


def small(operator, **settings):
    return KernelCall.of(operator, **{n: SIZES[n] for n in FORMS[operator].sizes}, **settings)


EVERY = [
    small(operator, data_type=data_type, direction=direction)
    for operator, form in FORMS.items()
    if not form.is_collective
    for data_type in form.types
    for direction in form.directions
]

KINDS = {
    Operator.LINEAR: KernelKind.LINEAR,
    Operator.MATMUL: KernelKind.MATMUL,
    Operator.CONV2D: KernelKind.DENSE,
    Operator.BATCH_NORM: KernelKind.BATCH_NORM,
    Operator.FROZEN_BATCH_NORM: KernelKind.BATCH_NORM,
    Operator.LAYER_NORM: KernelKind.LAYER_NORM,
    Operator.SOFTMAX: KernelKind.SOFTMAX,
    Operator.ATTENTION: KernelKind.ATTENTION,
    Operator.ADD_CHANNELS: KernelKind.BROADCAST,
    Operator.ADD_LAYOUTS: KernelKind.STRIDED,
    Operator.CAST: KernelKind.CAST,
    Operator.COPY: KernelKind.COPY,
    Operator.RELAYOUT: KernelKind.COPY,
    Operator.FILL: KernelKind.FILL,
    Operator.MEAN: KernelKind.REDUCTION,
    Operator.MAX_POOL: KernelKind.POOLING,
    Operator.EMBEDDING: KernelKind.INDEX,
}
"""Of the forward pass; every other operator is ELEMENTWISE."""


def test_calls_round_trip_through_text():
    assert [KernelCall.from_text(call.text) for call in EVERY] == EVERY


def test_texts_of_calls_do_not_change():
    """They are keys of stored measurements: whoever changes one loses what was measured."""
    assert small(Operator.LINEAR).text == "linear batch=4 rows=16 inputs=64 outputs=32 fp32"
    call = small(
        Operator.CONV2D, data_type=DataType.FP16, memory_format=MemoryFormat.CHANNELS_LAST,
        direction=Direction.WEIGHT_GRADIENT,
    )  # fmt: skip
    assert call.text == (
        "conv2d batch=4 inputs=64 outputs=32 height=14 window=3 stride=2 groups=1 fp16 "
        "channels-last weight-gradient"
    )
    product = small(Operator.MATMUL, tf32=True)
    assert product.text == "matmul batch=4 rows=16 depth=8 columns=24 fp32 tf32"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "winograd batch=1 fp32",
        "softmax batch=4 fp32",
        "softmax batch=4 width=64 operator=3 fp32",
        "softmax batch=0 width=64 fp32",
        "softmax batch=9999999999999999999999 width=64 fp32",
        "softmax batch=٣ width=64 fp32",
        "softmax batch=4 batch=5 width=64 fp32",
        "softmax batch=4 width=64 fp32 fp16",
        "softmax batch=4 width=64 fp32 quickly",
        "softmax batch=4 width=64 fp32 tf32",
        "cast batch=4 width=64 fp32",
        "linear batch=4 rows=16 inputs=64 outputs=32 fp16 tf32",
        "conv2d batch=4 inputs=64 outputs=32 height=14 window=3 stride=1 groups=3 fp32",
        "softmax batch=4 width=64 fp32 " + "x" * 10_000,
    ],
)  # fmt: skip
def test_invalid_texts_are_refused(text):
    with pytest.raises(InputError):
        KernelCall.from_text(text)


@pytest.mark.parametrize("call", EVERY, ids=str)
def test_every_call_runs_and_its_profile_has_only_the_kernels_of_its_direction(call):
    run = PreparedCall(call, torch.device("cpu")).run()
    for _ in range(3):
        run()
    profile = kernel_profile_of(call)
    assert profile.train is profile.infer
    assert profile.precision.removeprefix("amp-") == call.data_type
    if call.optimizer is not None:
        assert not len(profile.train)
        assert (profile.parameter_tensors, profile.parameters) == (3, 30)
        return
    kernels = profile.at(call.batch_size)
    assert len(kernels.table)
    forward = call.direction is Direction.FORWARD
    assert ((kernels.table.passes == Pass.FORWARD) == forward).all()
    expected = KINDS.get(call.operator, KernelKind.ELEMENTWISE)
    if forward:
        assert kernels.table.kinds.tolist() == [expected]
        assert kernels.table.half[0] == (
            call.data_type is not DataType.FP32 and call.operator is not Operator.CAST
        )


def test_gradients_of_data_and_weights_are_separate_kernels():
    """Libraries have a kernel for each, of another speed."""
    for operator in (Operator.LINEAR, Operator.CONV2D):
        for name in ("DATA_GRADIENT", "WEIGHT_GRADIENT"):
            table = kernel_profile_of(small(operator, direction=Direction[name])).train
            assert table.passes.tolist() == [Pass[name]]


def test_kernel_sizes_agree_with_hand_counts():
    call = KernelCall.of(
        Operator.CONV2D, DataType.FP16, MemoryFormat.CHANNELS_LAST,
        batch=8, inputs=64, outputs=128, height=28, window=3, stride=2, groups=1,
    )  # fmt: skip
    kernels = kernel_profile_of(call).at(8)
    assert kernels.table.channels_last.all()
    assert kernels.sizes[0, Size.FLOPS] == 2 * 8 * 14 * 14 * 128 * 64 * 9
    assert kernels.sizes[0, Size.WRITTEN_BYTES] == 2 * 8 * 14 * 14 * 128
    assert kernels.sizes[0, Size.READ_BYTES] == 2 * (8 * 28 * 28 * 64 + 128 * 64 * 9)
    launches = kernel_profile_of(small(Operator.LAUNCH))
    assert launches.train.counts.tolist() == [5]


def test_kernel_sizes_scale_with_the_batch():
    call = small(Operator.CONV2D, direction=Direction.BACKWARD)
    profile = kernel_profile_of(call)
    other = kernel_profile_of(call.with_batch(11))
    assert np.array_equal(profile.at(11).sizes, other.at(11).sizes)


@pytest.mark.parametrize(("groups", "kind"), [(32, KernelKind.GROUPED), (64, KernelKind.DEPTHWISE)])
def test_grouped_convolutions_have_their_own_kind(groups, kind):
    call = KernelCall.of(
        Operator.CONV2D, batch=2, inputs=64, outputs=64, height=14, window=3, stride=1,
        groups=groups,
    )  # fmt: skip
    assert kernel_profile_of(call).train.kinds.tolist() == [kind]


def test_tf32_setting_is_restored():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    for allowed in (True, False):
        with tf32_allowed(allowed):
            assert (cudnn.allow_tf32, matmul.allow_tf32) == (allowed, allowed)
    assert (cudnn.allow_tf32, matmul.allow_tf32) == before


# The catalogue: as large as it may be, within memory, and of every kind there is.


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
