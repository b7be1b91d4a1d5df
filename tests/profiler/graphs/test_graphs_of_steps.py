"""A model has one graph: in training and inference, and in every precision and layout."""

import pytest
from traced_steps import graph_of

from trappm.profiler.records import MemoryFormat, Phase, Precision
from trappm.profiler.traced_step import TraceSettings

IN_MIXED_PRECISION = TraceSettings(Precision.AMP_BF16, MemoryFormat.CHANNELS_LAST)
MODELS = (("test_vit", 64), ("test_efficientnet", 64))
"""With and without attention."""


def hashes(architecture, input_size):
    """Return the hashes of inference, of training, and of training in mixed precision."""
    yield graph_of(architecture, input_size).content_hash
    for settings in (TraceSettings(), IN_MIXED_PRECISION):
        yield graph_of(architecture, input_size, Phase.TRAIN, settings=settings).content_hash


@pytest.mark.parametrize(("architecture", "input_size"), MODELS)
def test_training_steps_have_the_graph_of_inference(architecture, input_size):
    assert len(set(hashes(architecture, input_size))) == 1
