"""One step by `trace`: at all batch sizes or at one, eager and compiled."""

import timm
import torch
from torch import nn

from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.records import Configuration, Execution, Precision, StepSettings
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import TraceKey, TraceSettings

IMAGES = torch.rand(4, 3, 16, 16)


def segmenter():
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3))


def test_a_compiled_step_that_needs_contiguous_tensors_has_kernels_of_its_own():
    def loss(output, _):
        return output.view(len(output), -1).mean()

    def kernels(execution):
        how = TraceSettings(execution=execution)
        made = trace(segmenter(), ExampleInputs.of(IMAGES), how, loss=loss)
        return int(made.kernels.table.counts.sum())

    assert kernels(Execution.COMPILE) < kernels(Execution.EAGER)


def test_another_way_of_attention_in_timm_is_another_key():
    key = TraceKey("vit_tiny_patch16_224", 224)
    fused = key.digest
    timm.layers.set_fused_attn(False)
    try:
        assert key.digest != fused
    finally:
        timm.layers.set_fused_attn(True)
    assert key.digest == fused


def test_precisions_with_equal_tensors_share_a_trace():
    """TF32 changes the time of kernels only."""
    settings = {TraceSettings.of(StepSettings(precision=precision)) for precision in Precision}
    keys = {TraceKey.of(Configuration(
        architecture="resnet18", batch_size=1, input_size=64, precision=precision,
    )) for precision in Precision}  # fmt: skip
    types = {precision.types for precision in Precision}
    assert {each.precision for each in settings} == {key.settings.precision for key in keys}
    assert {each.precision for each in settings} == types == {Precision.FP32, *types}
    assert len(types) == 4
