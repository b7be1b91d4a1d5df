"""MACs by rule against PyTorch's FlopCounterMode, which counts two flops for each."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from trappm.profiler.graphs.nodes import node_macs

size = st.integers(1, 6)


def flops(operation, *shapes):
    with FlopCounterMode(display=False) as counter:
        result = operation(*(torch.empty(shape, device="meta") for shape in shapes))
    return counter.get_total_flops(), tuple(result.shape)


@given(
    size, st.tuples(size, size), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 2)
)
def test_convolutions(batch, widths, groups, kernel, stride):
    channels, outputs = widths
    image = (batch, channels * groups, 9, 8)
    weight = (outputs * groups, channels, kernel, kernel)
    total, shape = flops(
        lambda x, w: functional.conv2d(x, w, stride=stride, groups=groups), image, weight
    )
    assert 2 * node_macs("Conv", {"group": groups}, [image, weight], [shape]) == total


@given(size, size, size, st.integers(1, 3))
def test_transposed_convolutions(batch, channels, outputs, kernel):
    image, weight = (batch, channels, 5, 5), (channels, outputs, kernel, kernel)
    total, shape = flops(functional.conv_transpose2d, image, weight)
    assert 2 * node_macs("ConvTranspose", {}, [image, weight], [shape]) == total


@given(size, size, size, size)
def test_products_of_matrices(batch, rows, inner, columns):
    left, right = (batch, rows, inner), (batch, inner, columns)
    total, shape = flops(torch.bmm, left, right)
    assert 2 * node_macs("MatMul", {}, [left, right], [shape]) == total
    equation = {"equation": "bij, bjk -> bik"}
    assert 2 * node_macs("Einsum", equation, [left, right], [shape]) == total
    spread = {"equation": "...ij,...jk"}
    assert 2 * node_macs("Einsum", spread, [left, right], [shape]) == total
    transposed = (inner, rows)
    total, shape = flops(lambda a, b: a.T @ b, transposed, (inner, columns))
    gemm = node_macs("Gemm", {"transA": 1}, [transposed, (inner, columns)], [shape])
    assert 2 * gemm == total


@given(size, size, size, size, size)
def test_attention(batch, heads, queries, keys, width):
    q, k = (batch, heads, queries, width), (batch, heads, keys, width)
    expected = 2 * batch * heads * queries * keys * width
    assert node_macs("Attention", {}, [q, k, k], [q]) == expected
    flat_q, flat_k = (batch, queries, heads * width), (batch, keys, heads * width)
    attributes = {"q_num_heads": heads, "kv_num_heads": heads}
    assert node_macs("Attention", attributes, [flat_q, flat_k, flat_k], [flat_q]) == expected


def test_reductions_count_what_they_read():
    assert node_macs("GlobalAveragePool", {}, [(2, 3, 8, 8)], [(2, 3, 1, 1)]) == 384
    assert node_macs("ReduceMean", {}, [(2, 3, 8, 8)], [(2, 3)]) == 384
