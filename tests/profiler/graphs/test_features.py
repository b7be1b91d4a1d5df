import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced_steps import graph_of

from trappm.profiler.graphs.features import (
    OPERATORS,
    STATIC_FEATURES,
    node_features,
    static_features,
)


@pytest.fixture(scope="module")
def template():
    return graph_of("test_vit", 64)


def test_node_features_encode_all_sizes_of_the_graph(template):
    graph = template.at(6)
    features = node_features(graph)
    assert features.dtype == np.float32
    assert features.shape == (graph.node_count, 113)
    assert [OPERATORS[i] for i in features[:, :98].argmax(1)] == list(graph.operators)
    assert (features[:, :98].sum(1) == 1).all()
    sizes = np.expm1(features[:, 98:].astype(np.float64))
    np.testing.assert_allclose(sizes[:, :6], graph.input_shapes, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sizes[:, 6:12], graph.output_shapes, rtol=1e-4, atol=1e-6)
    for column, values in enumerate((graph.macs, graph.parameters, graph.memory_bytes), start=12):
        np.testing.assert_allclose(sizes[:, column], values, rtol=1e-4, atol=1e-6)


@given(st.integers(1, 2048))
def test_static_features_scale_with_the_batch(template, batch_size):
    single, many = static_features(template.at(1)), static_features(template.at(batch_size))
    assert single.dtype == np.float64
    named = dict(zip(STATIC_FEATURES, many / single, strict=True))
    assert named["batch_size"] == named["macs"] == batch_size
    assert named["nodes"] == named["edges"] == named["parameters"] == 1
    assert 1 <= named["memory_bytes"] <= batch_size
