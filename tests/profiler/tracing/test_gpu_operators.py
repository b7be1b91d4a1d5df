"""What is remembered of an operator's results is what the operator would return again."""

import itertools

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
    "func",
    [
        ATEN.add.Tensor, ATEN.mul.Tensor, ATEN.div.Tensor, ATEN.gt.Tensor, ATEN.maximum.default,
        ATEN.silu_backward.default, ATEN.sigmoid_backward.default, ATEN.hardswish_backward.default,
        ATEN.relu.default, ATEN.gelu.default, ATEN.hardswish.default, ATEN.logical_not.default,
    ],
)  # fmt: skip
def test_results_of_elementwise_operators_are_derived_as_pytorch_finds_them(func):
    """The second call of each pattern of types is derived, with whichever shapes and layouts."""
    count = sum(isinstance(a.type, torch.TensorType) for a in func._schema.arguments)
    for _ in range(2):
        for args in itertools.product(IMAGES, repeat=count):
            try:
                expected = kind_of(func(*args))
            except (RuntimeError, ValueError, TypeError) as error:
                with pytest.raises(type(error)):
                    result_of(func, args, {})
                continue
            assert kind_of(result_of(func, args, {})) == expected, [kind_of(a) for a in args]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 4])
def test_results_of_softmax_and_products_are_derived_as_pytorch_finds_them(dtype, width):
    tokens, turned = meta(3, 5, 4, dtype=dtype), meta(3, 4, 5, dtype=dtype).transpose(1, 2)
    right, bias = meta(4, width, dtype=dtype), meta(width, dtype=dtype)
    images = meta(2, 8, 3, 5, dtype=dtype).to(memory_format=LAST)
    calls = [
        *((ATEN._softmax.default, (x, -1, False)) for x in (tokens, turned, images)),
        *((ATEN._softmax_backward_data.default, (x, x, -1, dtype)) for x in (tokens, images)),
        *((ATEN.roll.default, (x, [1], [2])) for x in (tokens, images)),
        (ATEN.mm.default, (tokens[0], right)),
        (ATEN.mm.default, (tokens[0], meta(width, 4, dtype=dtype).t())),
        (ATEN.addmm.default, (bias, tokens[0], right)),
        (ATEN.addmm.default, (meta(5, width, dtype=dtype), tokens[0], right)),
        (ATEN.bmm.default, (turned, meta(3, 4, width, dtype=dtype))),
    ]
    for func, args in calls * 2:
        assert kind_of(result_of(func, args, {})) == kind_of(func(*args)), func


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ATEN.mm.default, (meta(2, 3), meta(4, 5))),
        (ATEN.mm.default, (meta(2, 2, 3), meta(2, 3, 5))),
        (ATEN.mm.default, (meta(3), meta(3))),
        (ATEN.bmm.default, (meta(2, 3), meta(3, 5))),
        (ATEN.addmm.default, (meta(7), meta(2, 3), meta(3, 5))),
        (ATEN.add.Tensor, (meta(2, 3), meta(2, 4))),
        (ATEN.add_.Tensor, (meta(2, 3), meta(2, 4))),
        (ATEN.add_.Tensor, (meta(3), meta(2, 3))),
    ],
)
def test_calls_that_pytorch_refuses_are_refused_still(func, args):
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        func(*args)
    with pytest.raises((RuntimeError, ValueError)):
        result_of(func, args, {})


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
