"""Decoders of published sheets have the parameters that the sheets tell."""

from __future__ import annotations

import pytest

from benchmarks.learner.language.decoder import Method, parameter_count
from benchmarks.learner.language.fine_tuning import peaks_gb, trained_parameters
from benchmarks.learner.language.shapes import SHAPES, gpt


def test_mpt_has_the_published_parameters() -> None:
    assert parameter_count(gpt(4096, 32, 32, 50368, 2048)) == 6_658_859_008


@pytest.mark.parametrize(
    ("name", "trained"),
    [("phi1513b", 1_572_864), ("llama213b", 6_553_600), ("falcon40b", 12_042_240)],
)
def test_lora_trains_the_published_parameters(name: str, trained: int) -> None:
    assert trained_parameters(SHAPES[name], Method(rank=8)) == trained


def test_memory_of_lora_is_the_published_peak() -> None:
    method = Method(rank=8, chunk=128, wide_scores=True)
    assert peaks_gb(SHAPES["phi1513b"], method, 1044, 2)[0] == pytest.approx(6.76, rel=0.01)
