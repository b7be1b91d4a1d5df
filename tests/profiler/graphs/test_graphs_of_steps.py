"""A model has one graph: in training and inference, and in every precision and layout."""

import pytest
from traced_steps import graph_of

from trappm.profiler.errors import TrappmError
from trappm.profiler.models import zoo
from trappm.profiler.records import MemoryFormat, Phase, Precision
from trappm.profiler.traced_step import TraceSettings

IN_MIXED_PRECISION = TraceSettings(Precision.AMP_BF16, MemoryFormat.CHANNELS_LAST)


def hashes(architecture, input_size):
    """Hashes of inference, of training, and of training in mixed precision."""
    graphs = [graph_of(architecture, input_size)] + [
        graph_of(architecture, input_size, Phase.TRAIN, settings=settings)
        for settings in (TraceSettings(), IN_MIXED_PRECISION)
    ]
    return {graph.content_hash for graph in graphs}


@pytest.mark.parametrize("architecture", ["test_vit", "test_efficientnet"])  # attention or none
def test_training_steps_have_the_graph_of_inference(architecture):
    assert len(hashes(architecture, 64)) == 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_training_steps_of_all_of_timm_have_the_graph_of_inference():
    counts = {}
    for architecture in zoo.architectures(["*"]):
        try:
            size = zoo.native_input_size(architecture) or 224
            counts[architecture] = len(hashes(architecture, size))
        except TrappmError:  # no graph, or a step that is not trained
            continue
    assert len(counts) > 1000
    assert [name for name, count in counts.items() if count > 1] == []
