"""torchvision's operators are traced as on a GPU, with or without its C++ part."""

import numpy as np
import pytest
import torch
import torchvision
from small_modules import Function
from torch import nn
from torchvision import ops

from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.records import Phase
from trappm.profiler.traced_step import KernelKind, Size, TraceSettings
from trappm.profiler.tracing.known_values import ALL_BOXES
from trappm.profiler.tracing.tracer import Tracer

IMAGES = torch.rand(4, 3, 16, 16)
BOXES = torch.tensor([[i, 0, 0, 9.0, 9.0] for i in range(4)])
PIXELS = 16 * 16
FP32 = TraceSettings()


def traced(module, *inputs, phase=Phase.TRAIN, batch_sizes=(4, 8), by_values=False, how=FP32):
    batch_sizes = (len(inputs[0]),) * 2 if by_values else batch_sizes
    copied = on_meta(module, None, how.memory_format)
    original = module if by_values else None
    inputs = ExampleInputs.of(*inputs)
    return Tracer(copied, inputs, how, phase, batch_sizes, original=original).trace()


def sizes_of(trace):
    """Bytes of all allocations at batch size 4."""
    allocations = trace.allocations
    return allocations.sizes[allocations.kinds == 0, 0].tolist()


def pooling(pool, channels):
    def body(self, images, boxes):
        return self.head(pool(self.stem(images), boxes).flatten(1))

    stem = nn.Conv2d(3, channels, 3, padding=1)
    return Function(body, stem=stem, head=nn.Linear(channels * 9, 10))


def align(images, boxes):
    return ops.roi_align(images, boxes, 3, sampling_ratio=2)


def roi_pool(images, boxes):
    return ops.roi_pool(images, boxes, 3)


@pytest.mark.parametrize("pool", [align, roi_pool])
def test_pooled_regions_have_results_and_a_gradient_of_the_images(pool):
    train = traced(pooling(pool, 18), IMAGES, BOXES)
    pooled_bytes, image_bytes = 4 * 4 * 18 * 9, 4 * 4 * 18 * PIXELS
    # Results and their gradients; with places of maxima or channels, whose gradient is zeros, also
    # in C++.
    assert sizes_of(train).count(pooled_bytes) == (2 if pool is align else 4)
    assert sizes_of(train).count(image_bytes) == 2  # of the convolution, and their gradient
    assert (train.kernels.table.kinds == KernelKind.INDEX).sum() == 2
    assert len(train.allocations.gradients) == 4


def test_the_graph_has_the_operators_of_onnx():
    assert "RoiAlign" in traced(pooling(align, 18), IMAGES, BOXES).graph.operators
    assert "DeformConv" in traced(deformable(), IMAGES).graph.operators


def deformable(groups=1):
    def body(self, images):
        images = self.stem(images)
        mask = self.mask(images).sigmoid()
        return self.head(self.deformed(images, self.offset(images), mask).mean((2, 3)))

    return Function(
        body,
        stem=nn.Conv2d(3, 8, 3, padding=1),
        offset=nn.Conv2d(8, 18, 3, padding=1),
        mask=nn.Conv2d(8, 9, 3, padding=1),
        deformed=ops.DeformConv2d(8, 16, 3, padding=1, groups=groups),
        head=nn.Linear(16, 10),
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_a_deformable_convolution_multiplies_columns(groups):
    train, infer = (traced(deformable(groups), IMAGES, phase=phase) for phase in Phase)
    columns, table = 4 * (8 * 9) * (4 * PIXELS), train.kernels.table
    assert sizes_of(infer).count(columns) == 1
    assert sizes_of(train).count(columns) == 3  # forward, and for both kinds of gradients
    assert max(sizes_of(train)) == columns
    kind = KernelKind.LINEAR if groups == 1 else KernelKind.MATMUL
    depths = table.sizes[table.kinds == kind][:, Size.DEPTH]
    assert 8 * 9 // groups in depths[:, 0]
    assert PIXELS in depths[:, 1]  # of the weight's gradient
    assert len(train.allocations.gradients) == 10


def detector():
    def body(self, images):
        features = self.stem(images)
        scores, *boxes = self.head(features).flatten(2).unbind(1)
        results = []
        for score, box in zip(scores, torch.stack(boxes, -1), strict=True):
            kept = ops.nms(box, score, 0.5)[:20]
            results.append(score[kept].mean() + box[kept].mean())
        return torch.stack(results)

    return Function(body, stem=nn.Conv2d(3, 8, 3, padding=1), head=nn.Conv2d(8, 5, 1))


def test_suppression_is_taken_to_keep_all_boxes_with_a_remark():
    infer = traced(detector(), IMAGES, phase=Phase.INFER, batch_sizes=(4, 4))
    assert infer.remark == ALL_BOXES
    assert 8 * PIXELS in sizes_of(infer)


def test_suppression_on_values_leaves_out_what_better_boxes_overlap():
    corners, scores = torch.rand(100, 2), torch.rand(100)
    boxes = torch.cat([corners, corners + 0.4 * torch.rand(100, 2)], 1)
    overlaps, left, expected = ops.box_iou(boxes, boxes), scores.argsort(descending=True), []
    while len(left):
        expected.append(int(left[0]))
        left = left[overlaps[left[0], left] <= 0.5]
    assert torch.ops.torchvision.nms(boxes, scores, 0.5).tolist() == expected


@pytest.mark.filterwarnings("ignore")
def test_a_detector_of_torchvision_trains_by_values():
    module = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64
    )
    images = [torch.rand(3, 64, 64) for _ in range(2)]
    target = {"boxes": torch.tensor([[4.0, 4, 30, 30]]), "labels": torch.tensor([1])}
    train = traced(module, images, [target, target], by_values=True)
    trained = [p for p in module.parameters() if p.requires_grad]
    assert len(train.allocations.gradients) == len(trained)
    assert np.isin(KernelKind.INDEX, train.kernels.table.kinds)
