"""One rule for what fits on every surface, and which devices are covered by which evidence."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_samples import graphs, hasty_encoder, snapshot_of, trained

import trappm
from trappm.learner.heads.physics_heads import Heads
from trappm.learner.paper.presets import LAPTOP
from trappm.prediction.fit import (
    MAX_BATCH,
    MemoryInterval,
    Verdict,
    largest_batch,
    largest_batch_of_many,
)
from trappm.prediction.selection import OWN_LABELS
from trappm.profiler.devices.catalogue import USABLE_SHARE


@given(
    fixed=st.floats(1, 5000), per_sample=st.floats(0.01, 500), above=st.floats(1, 2),
    capacity=st.floats(500, 200_000), reserve=st.floats(0.06, 0.99),
)  # fmt: skip
def test_the_largest_batch_is_the_last_whose_upper_bound_fits(
    fixed, per_sample, above, capacity, reserve
):
    def memory(size):
        median = fixed + per_sample * size
        return MemoryInterval(median, median / above, median * above)

    largest = largest_batch(memory, capacity, reserve)
    usable = (1 - reserve) * capacity
    assert largest == 0 or memory(largest).high_mib <= usable * (1 + 1e-9)
    assert largest == MAX_BATCH or memory(largest + 1).high_mib > usable * (1 - 1e-9)


@given(
    fixed=st.floats(1, 5000), per_sample=st.floats(0.01, 500), above=st.floats(1, 2),
    capacity=st.floats(500, 200_000), roughness=st.floats(0, 0.2), seed=st.integers(0, 99),
)  # fmt: skip
def test_many_batch_sizes_at_once_find_the_same_largest_batch(
    fixed, per_sample, above, capacity, roughness, seed
):
    def memory(size):
        noise = np.random.default_rng((seed, size)).uniform(-roughness, roughness)
        median = (fixed + per_sample * size) * (1 + noise)
        return MemoryInterval(median, median / above, median * above)

    together = largest_batch_of_many(lambda sizes: [*map(memory, sizes)], capacity)
    assert together == largest_batch(memory, capacity)


@pytest.mark.parametrize(("model", "device"), [("test_resnet", "gtx1650"), ("test_vit", "a100")])
def test_the_largest_batch_is_found_in_few_evaluations_of_the_heads(model, device, monkeypatch):
    evaluated, predict = [], Heads.predict

    def counted(heads, workloads):
        evaluated.append(len(workloads))
        return predict(heads, workloads)

    monkeypatch.setattr(Heads, "predict", counted)
    asked = {"device": device, "phase": "train", "input_size": 224}
    answer = trappm.predict(model, **asked, batch_size=3)
    assert len(evaluated) <= 7

    def memory(size):
        return trappm.predict(model, **asked, batch_size=size).memory

    assert answer.largest_batch == largest_batch(memory, answer.capacity_mib)


@pytest.mark.parametrize(
    ("median", "high", "verdict"),
    [
        (900, 940, Verdict.FITS),
        (900, 941, Verdict.MAY_NOT_FIT),
        (940, 2000, Verdict.MAY_NOT_FIT),
        (941, 2000, Verdict.DOES_NOT_FIT),
    ],
)
def test_the_upper_bound_decides_fits_and_the_median_does_not_fit(median, high, verdict):
    assert MemoryInterval(median, 1, high).verdict(1000) is verdict


def test_a_model_larger_than_the_gpu_does_not_fit(printed):
    first, *lines = printed("predict vit_7b_patch16_dinov3 --device gtx1650").splitlines()
    assert first.startswith("Does not fit GTX 1650 4 GB: ")
    assert "Not even batch 1 fits GTX 1650 4 GB." in lines


def test_network_heads_predict_the_risk_of_running_out_of_memory(tmp_path):
    head = replace(LAPTOP.head, physical_prior=False, widths=(8,), hidden=(8,), steps=2, members=2)
    preset = replace(LAPTOP, encoder=replace(LAPTOP.encoder, widths=(8, 8), steps=2), head=head)
    encoder = hasty_encoder(preset.encoder)
    heads = trained(np.full((len(graphs()), 3), 15_000.0), head, encoder)
    snapshot = snapshot_of(
        tmp_path, {"v100": heads}, preset=preset, encoder=encoder, cards={"v100": "v100 16gb"}
    )
    prediction = trappm.predict("test_resnet", input_size=64, snapshot=snapshot, device="v100")
    limit = USABLE_SHARE * prediction.capacity_mib
    assert 0 <= prediction.out_of_memory <= 1
    assert (prediction.out_of_memory > 0.5) == (prediction.memory_mib > limit)


def test_devices_come_with_their_evidence(as_json, refusal):
    rows = {row.device: row for row in trappm.devices("default")}
    assert rows["h100"].evidence["train"] == {"step_time_ms": OWN_LABELS, "memory_mib": OWN_LABELS}
    assert "data sheet" in rows["rtx-5090-32gb"].evidence["train"]["step_time_ms"]
    assert not rows["cpu-2t"].has_labels
    assert all(row.evidence for row in rows.values())
    assert {row["device"] for row in as_json("devices")} == set(rows)
    assert [row["device"] for row in as_json("devices v100")] == ["v100-16gb"]
    assert "unknown device 'v9000'" in refusal("devices v9000")
