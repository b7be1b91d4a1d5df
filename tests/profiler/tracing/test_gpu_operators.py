"""What is remembered of an operator's results is what the operator would return again."""

import pytest
import torch

from trappm.profiler.tracing.gpu_operators import result_of

ATEN = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def kind_of(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type


CALLS = [
    (ATEN.add.Tensor, (meta(4, 1, 3), meta(5, 1)), {}),
    (ATEN.add.Tensor, (meta(4, 3), meta((), dtype=torch.float64)), {}),
    (ATEN.mul.Scalar, (meta(4, dtype=torch.int64), 1), {}),
    (ATEN.mul.Scalar, (meta(4, dtype=torch.int64), 1.0), {}),
    (ATEN.mul.Scalar, (meta(4, dtype=torch.int64), True), {}),
    (ATEN.relu.default, (meta(2, 8, 3, 3).to(memory_format=torch.channels_last),), {}),
    (ATEN.native_dropout.default, (meta(3, 3), 0.5, True), {}),
    (ATEN.cat.default, ([meta(2, 3), meta(4, 3)],), {}),
    (ATEN.convolution_backward.default,
     (meta(2, 8, 6, 6), meta(2, 3, 8, 8), meta(8, 3, 3, 3), [8], [1, 1], [0, 0], [1, 1], False,
      [0, 0], 1, [False, True, True]), {}),
    (ATEN.empty.memory_format, ([2, 3],), {"device": torch.device("cpu")}),
    (ATEN.empty.memory_format, ([2, 3],), {"device": torch.device("meta")}),
    (ATEN.sum.dim_IntList, (meta(4, 3), [0]), {"dtype": torch.float64}),
]  # fmt: skip


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS)
def test_a_second_call_returns_what_the_first_did(func, args, kwargs):
    def kinds(output):
        several = output if isinstance(output, tuple) else (output,)
        return [None if t is None else kind_of(t) for t in several]

    expected = kinds(func(*args, **kwargs))
    first, second = (result_of(func, args, kwargs) for _ in range(2))
    assert kinds(first) == kinds(second) == expected
    if expected[-1] is not None:
        outputs = [o[-1] if isinstance(o, tuple) else o for o in (first, second)]
        assert len({o.untyped_storage()._cdata for o in outputs}) == 2


LAST = torch.channels_last
IMAGES = [
    meta(2, 8, 3, 5),
    meta(2, 8, 3, 5).to(memory_format=LAST),
    meta(2, 8, 5, 3).transpose(2, 3),
    meta(2, 8, 6, 5)[:, :, ::2],
    meta(2, 8, 1, 1),
    meta(2, 1, 3, 5),
    meta(8, 1, 1),
    meta(5),
    meta(2, 8, 3, 5, dtype=torch.float16),
    meta(2, 8, 3, 5, dtype=torch.int64),
    meta(2, 8, 3, 5, dtype=torch.bool),
    meta(1, 8, 1, 1).to(memory_format=LAST),
]


@pytest.mark.parametrize(
    ("func", "others"),
    [
        (ATEN._unsafe_view.default, ([6],)),  # its schema does not say that it is a view
        (ATEN.view.default, ([6],)),
        (ATEN.relu_.default, ()),
        (ATEN.hardswish_.default, ()),
        (ATEN.add_.Tensor, (meta(2, 3),)),
        (ATEN.mul_.Tensor, (meta(3),)),
        (ATEN.zero_.default, ()),
    ],
)
def test_what_lies_in_the_memory_of_another_tensor_still_does(func, others):
    for _ in range(3):
        tensor = meta(2, 3)
        result = result_of(func, (tensor, *others), {})
        assert result.untyped_storage()._cdata == tensor.untyped_storage()._cdata
