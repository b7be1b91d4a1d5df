"""Architectures under two names are one, wherever some are held out."""

import numpy as np
import pytest
from workload_samples import one_layer

from research.evaluation.benchmark import Samples, SplitKind, splits_of
from trappm.learner.stats.folds import content_groups
from trappm.learner.workload import Workload
from trappm.profiler.records import Configuration, Graph
from trappm.profiler.static_profile import graph_template, kernel_profile

TWINS = [
    ("beit_base_patch16_224", "beitv2_base_patch16_224"),
    ("deit_tiny_patch16_224", "vit_tiny_patch16_224"),
    ("tf_mobilenetv3_small_075", "tf_mobilenetv3_small_100"),
]


@pytest.mark.parametrize(
    ("first", "second", "are_twins"), [(*TWINS[0], True), (*TWINS[1], True), (*TWINS[2], False)]
)
def test_timm_names_with_equal_layers_are_one_group(first, second, are_twins):
    graphs = [graph_template(first, 224).at(8), graph_template(second, 224).at(32)]
    pair = [Workload(graph=graph) for graph in graphs]
    groups = content_groups([first, second], pair)
    assert groups == ([first, first] if are_twins else [first, second])
    assert content_groups([second, first], pair[::-1]) == groups[::-1]


def test_groups_without_graphs_use_kernels_or_names():
    first, again, other = (
        kernel_profile(name, 224) for name in ("resnet10t", "resnet10t", "resnet14t")
    )
    made = [Workload(graph=Graph.empty(4), kernels=kernels) for kernels in (first, again, other)]
    assert content_groups(["b", "a", "c"], made) == ["a", "a", "c"]
    nothing = [Workload(graph=Graph.empty(1))] * 3
    assert content_groups(["b", "a", "b"], nothing) == ["b", "a", "b"]


def test_transformer_is_one_group_for_all_training_options():
    ways = ["hf:gpt2", "hf:gpt2,eager", "hf:gpt2,lora=16", "hf:gpt2-xl", "hf:gpt2-xl,lora=16"]
    nothing = [Workload(graph=Graph.empty(1))] * len(ways)
    assert content_groups(ways, nothing) == ["hf:gpt2"] * 3 + ["hf:gpt2-xl"] * 2


# The layers are those of the numbers: a ViT is a DeiT, of another family.
NAMES = {
    "vit_a": 1, "vit_b": 2, "vit_c": 3, "deit_a": 1, "deit_b": 4, "deit_c": 5,
    "resnet18": 6, "tv_resnet18": 6, "resnet34": 7, "resnet50": 8, "resnet101": 9,
}  # fmt: skip


@pytest.fixture
def samples():
    configurations = [
        Configuration(architecture=name, batch_size=batch, input_size=64)
        for name in NAMES
        for batch in (1, 2)
    ]
    n = len(configurations)
    return Samples(
        configurations,
        [Workload(graph=one_layer(NAMES[c.architecture], c.batch_size)) for c in configurations],
        np.arange(1.0, n + 1),
        np.full(n, np.nan),
        np.ones(n, dtype=bool),
        np.zeros(n, dtype=bool),
    )


@pytest.mark.parametrize("kind", [k for k in SplitKind if k is not SplitKind.CONFIGURATIONS])
def test_duplicates_of_held_out_rows_are_not_trained_on(samples, kind):
    layers = np.array([NAMES[name] for name in samples.architectures])
    divided = 0
    for split in splits_of(samples, kind, range(20)):
        assert not set(layers[split.train]) & set(layers[split.test])
        assert not (split.train & split.test).any()
        divided += not (split.train | split.test).all()
    # Whole families hold a twin of another family out, which then teaches nothing either.
    assert (divided > 0) == (kind is not SplitKind.ARCHITECTURES)
