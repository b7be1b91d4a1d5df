"""From a model to its graph: the counts are right, for every batch size, however it is stored."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_export import export_onnx, file_graph
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trappm.profiler.errors import InputError, ModelFileError, UnsupportedModelError
from trappm.profiler.models import zoo

LINEAR = ("Conv", "Gemm", "MatMul")

# One or two of each family of the paper, with what makes it special.
MODELS = (
    ("test_convnext", 64),
    ("convnext_zepto_rms", 32),
    ("densenet121", 32),
    ("test_efficientnet", 64),
    ("semnasnet_050", 32),
    ("mobilenetv3_small_050", 64),
    ("poolformerv2_s12", 32),
    ("test_resnet", 64),
    ("swin_s3_tiny_224", 64),
    ("visformer_tiny", 32),
    ("test_vit", 64),
    ("test_vit4", 64),
)
TINY = ("test_convnext", "test_efficientnet_ln", "test_resnet", "test_vit", "test_vit2")


@cache
def content(architecture, input_size):
    """The file's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(architecture, input_size, path)
        return path.read_bytes()


@cache
def template(architecture, input_size):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(content(architecture, input_size))
        return file_graph(path)


def reference(architecture, input_size, batch_size):
    """MACs by PyTorch's own counter, and the number of parameters."""
    with torch.device("meta"):
        model = zoo.create_model(architecture, input_size).eval()
        images = torch.empty(batch_size, 3, input_size, input_size)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images)
    return counter.get_total_flops() // 2, sum(p.numel() for p in model.parameters())


def linear_macs(graph):
    return sum(
        macs for macs, op in zip(graph.macs.tolist(), graph.operators, strict=True) if op in LINEAR
    )


@pytest.mark.parametrize(("architecture", "input_size"), MODELS)
def test_macs_and_parameters_are_those_of_pytorch(architecture, input_size):
    graph = template(architecture, input_size).at(7)
    macs, parameters = reference(architecture, input_size, 7)
    assert linear_macs(graph) == macs
    assert macs < graph.macs.sum() < 1.25 * macs
    assert graph.parameters.sum() == parameters


def test_work_on_weights_alone_is_folded_even_where_it_is_done_for_each_sample():
    """test_vit3 projects its one learned query (96 to 96) for each image of the batch."""
    graph = template("test_vit3", 64).at(7)
    macs, parameters = reference("test_vit3", 64, 7)
    assert macs - linear_macs(graph) == 7 * 96 * 96
    assert graph.parameters.sum() == parameters


@pytest.mark.parametrize(("architecture", "input_size"), MODELS)
@settings(max_examples=3, deadline=None)
@given(batch_size=st.integers(1, 300))
def test_a_rebatched_template_equals_a_fresh_reading_at_that_batch(
    tmp_path_factory, architecture, input_size, batch_size
):
    """The same file with its batch axis closed; MODELS are of all families."""
    model = onnx.ModelProto.FromString(content(architecture, input_size))
    for value in (*model.graph.input, *model.graph.output):
        if value.name in ("image", "logits"):
            value.type.tensor_type.shape.dim[0].dim_value = batch_size
    path = tmp_path_factory.mktemp("closed") / "m.onnx"
    path.write_bytes(model.SerializeToString())
    fresh = file_graph(path)
    assert fresh.fixed_batch_size == batch_size
    assert_same(template(architecture, input_size).at(batch_size), fresh.at(batch_size))


def assert_same(graph, other):
    assert graph.operators == other.operators
    assert graph.batch_size == other.batch_size
    names = ("edges", "input_shapes", "output_shapes", "macs", "parameters", "memory_bytes")
    for name in names:
        assert np.array_equal(getattr(graph, name), getattr(other, name)), name


@pytest.mark.parametrize(("architecture", "input_size"), MODELS)
def test_only_computing_nodes_are_left_and_all_are_connected(architecture, input_size):
    graph = template(architecture, input_size).at(1)
    assert not {"Constant", "Identity", "Shape", "Cast", "Where"} & set(graph.operators)
    reached = {0} | set(graph.edges[:, 1].tolist())
    used = {graph.node_count - 1} | set(graph.edges[:, 0].tolist())
    assert reached == used == set(range(graph.node_count))
    assert (graph.edges[:, 0] < graph.edges[:, 1]).all()


def test_sizes_of_a_model_counted_by_hand(tmp_path):
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    )
    export_onnx(module, 4, tmp_path / "m.onnx")
    graph = file_graph(tmp_path / "m.onnx").at(6)
    assert graph.operators == ("Conv", "BatchNormalization", "Relu", "Flatten", "Gemm")
    assert graph.parameters.tolist() == [8 * 27 + 8, 16, 0, 0, 128 * 5 + 5]
    assert graph.macs.tolist() == [6 * 16 * 8 * 27, 768, 768, 0, 6 * 128 * 5]
    assert graph.memory_bytes.tolist() == [4 * (768 + 224), 4 * (768 + 16), 3072, 3072, 4 * 675]
    assert graph.input_shapes[0].tolist() == [6, 3, 4, 4, 0, 0]
    assert graph.output_shapes[-1].tolist() == [6, 5, 0, 0, 0, 0]
    assert graph.edges.tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]


class Shared(nn.Module):
    """One convolution used twice, beside a weight that is rearranged before its use."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return self.conv(torch.relu(self.conv(x))) * self.scale.view(1, 3, 1, 1)


def test_a_shared_weight_counts_at_its_first_use(tmp_path):
    export_onnx(Shared(), 8, tmp_path / "m.onnx")
    graph = file_graph(tmp_path / "m.onnx").at(1)
    assert graph.operators == ("Conv", "Relu", "Conv", "Mul")
    assert graph.parameters.tolist() == [81, 0, 0, 3]


class BakedBatch(nn.Module):
    def forward(self, x):
        return x.reshape(1, -1, 3)


def test_a_batch_size_that_is_written_into_the_model_is_noticed(tmp_path):
    export_onnx(BakedBatch(), 8, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match="batch size is written into the model"):
        file_graph(tmp_path / "m.onnx")


def test_an_open_image_size_is_asked_for(tmp_path):
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph(
        [node], "g", [value("x", 1, ["n", 3, "h", "w"])], [value("y", 1, ["n", 3, "h", "w"])]
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match="give an input size"):
        file_graph(tmp_path / "m.onnx")
    assert file_graph(tmp_path / "m.onnx", input_size=32).at(2).macs.tolist() == [2 * 3 * 32 * 32]
    export_onnx("test_resnet", 64, tmp_path / "fixed.onnx")
    with pytest.raises(InputError, match="not 96 px"):
        file_graph(tmp_path / "fixed.onnx", input_size=96)
