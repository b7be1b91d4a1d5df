"""The lists for a day with a GPU hold what they say: all families and settings, in short steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from trappm.profiler.measuring.sweep import read_configurations
from trappm.profiler.models.families import FAMILIES, family_of
from trappm.profiler.records import (
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
)

EXAMPLES = Path(__file__).parents[3] / "examples"
CHECK = read_configurations(EXAMPLES / "gpu_check.yaml")
TOO_LARGE = [c for c in CHECK if c.batch_size == 4096]
FIT = [c for c in CHECK if c.batch_size < 4096]


def test_the_list_has_all_that_a_check_needs():
    assert (len(FIT), len(TOO_LARGE)) == (230, 6)
    assert len({c.architecture for c in CHECK}) == 30
    plain = [c for c in FIT if c.precision is Precision.FP32 and c.optimizer is Optimizer.SGD]
    for family in FAMILIES:
        ours = [c for c in plain if family_of(c.architecture) == family]
        assert {c.phase for c in ours} == set(Phase), family
        assert len({c.batch_size for c in ours if c.phase is Phase.TRAIN}) >= 3, family
    settings = Counter((c.precision, c.memory_format) for c in FIT if c.batch_size == 64)
    for half in (Precision.AMP_FP16, Precision.AMP_BF16):
        assert [settings[half, layout] for layout in MemoryFormat] == [15, 15]
    assert {c.optimizer for c in FIT} == set(Optimizer) - {Optimizer.ADAMW}
    assert {c.input_size for c in FIT} == {128, 160, 224}
    assert {c.batch_size for c in FIT if c.phase is Phase.INFER} == {1, 64}


def test_the_list_of_repeats_is_a_part_of_it_in_another_order():
    repeat = read_configurations(EXAMPLES / "gpu_repeat.yaml")
    assert len(repeat) == 60
    assert set(repeat) < set(FIT)
    places = [CHECK.index(c) for c in repeat]
    assert places != sorted(places)
    assert {family_of(c.architecture) for c in repeat} == set(FAMILIES)
    assert {c.precision for c in repeat} == set(Precision) - {Precision.BF16}
    assert {c.phase for c in repeat} == set(Phase)
