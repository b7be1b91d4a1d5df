"""A model has one graph: in training and inference, and in every precision and layout."""

import pytest
from traced_steps import graph_of

from trappm.profiler.records import MemoryFormat, Phase, Precision
from trappm.profiler.traced_step import TraceSettings

IN_MIXED_PRECISION = TraceSettings(Precision.AMP_BF16, MemoryFormat.CHANNELS_LAST)


@pytest.mark.parametrize("architecture", ["test_vit", "test_efficientnet"])  # attention or none
def test_training_steps_have_the_graph_of_inference(architecture):
    hashes = {graph_of(architecture, 64).content_hash}
    for settings in (TraceSettings(), IN_MIXED_PRECISION):
        hashes.add(graph_of(architecture, 64, Phase.TRAIN, settings=settings).content_hash)
    assert len(hashes) == 1
