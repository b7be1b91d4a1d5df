"""Snapshots: the same predictions after loading, and every kind of damage is told."""

import copy
import json
import os
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest

from trappm.learner.heads.physics_heads import train_heads
from trappm.learner.interface import TrainedHeads
from trappm.learner.snapshots import manifest as manifests
from trappm.learner.snapshots.manifest import label_set_hash, seal
from trappm.learner.snapshots.snapshot import copy_snapshot, load_snapshot, save_snapshot
from trappm.profiler.errors import SnapshotError
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision, StepSettings


@dataclass(frozen=True)
class Label:
    configuration_id: str
    device: str
    values: tuple
    provenance: str = "measured"


LABELS = [Label("c1", "cpu-2t", (1.0, 2.0, None)), Label("c2", "cpu-1t", (3.0, None, None))]
FIELDS = {"campaign": "test", "errors": {"cpu-2t": {}}, "label_counts": {"measured": 2}}


@pytest.fixture(scope="module")
def content(zoo, measure, small):
    workloads, groups = zoo.workloads(np.arange(0, 96, 7))
    graphs = [workload.graph for workload in workloads]
    preset = replace(small, head=replace(small.head, steps=5))
    settings = StepSettings(Precision.AMP_FP16, MemoryFormat.CHANNELS_LAST, Optimizer.ADAM)
    heads = {
        device: {
            Phase.TRAIN: TrainedHeads(
                train_heads(
                    workloads, measure(graphs, speed=speed), groups=groups, preset=preset.head,
                    generator=np.random.default_rng(0),
                ),
                (settings,),
            )
        }
        for device, speed in (("cpu-2t", 1.0), ("cpu-1t", 0.6))
    }  # fmt: skip
    return {
        "encoder": zoo.encoder,
        "heads": heads,
        "source_device": "cpu-2t",
        "preset": preset,
        "labels": LABELS,
        "fields": FIELDS,
    }


@pytest.fixture
def saved(content, tmp_path):
    return save_snapshot(tmp_path / "registry", **content)


def rewrite(folder, **changes):
    """Changes the manifest as an attacker would: checksum and id fit again."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(seal(manifest)))


def test_a_loaded_snapshot_predicts_the_same(saved, content, zoo):
    loaded = load_snapshot(saved.folder)
    assert loaded.id == saved.id == saved.folder.name
    assert loaded.source_device == "cpu-2t"
    for device in ("cpu-2t", "cpu-1t"):
        workloads = zoo.workloads(range(96))[0]
        trained = content["heads"][device][Phase.TRAIN]
        before = trained.heads.predict(workloads)
        assert loaded.trained(device, Phase.TRAIN).settings == trained.settings
        after = loaded.predict(workloads, device)
        assert after.metrics == before.metrics
        for name in ("median", "low", "high", "log_std"):
            np.testing.assert_allclose(getattr(after, name), getattr(before, name), rtol=1e-4)


def test_the_manifest_describes_the_snapshot(saved):
    manifest = json.loads((saved.folder / "manifest.json").read_text())
    assert manifest == saved.manifest.to_json()
    assert manifest["campaign"] == "test"
    assert sorted(manifest["heads"]) == ["cpu-1t", "cpu-2t"]
    assert manifest["heads"]["cpu-2t"]["train"]["metrics"] == ["step_time_ms", "memory_mib"]
    assert manifest["training_labels"]["counts"] == {
        "cpu-2t": {"measured": 1},
        "cpu-1t": {"measured": 1},
    }
    assert manifest["training_labels"]["sha256"] == label_set_hash(LABELS[::-1])
    changed = [LABELS[0], replace(LABELS[1], values=(3.0, 0.0, None))]
    assert len({label_set_hash(labels) for labels in (LABELS, changed, LABELS[:1])}) == 3
    assert manifest["versions"]["torch"]
    assert {*manifest["files"], "manifest.json"} == set(os.listdir(saved.folder))


def test_equal_content_has_one_id_and_is_stored_once(saved, content):
    before = (saved.folder / "manifest.json").read_bytes()
    again = save_snapshot(saved.folder.parent, **content)
    assert again.id == saved.id
    assert (saved.folder / "manifest.json").read_bytes() == before
    assert os.listdir(saved.folder.parent) == [saved.id]
    child = {**FIELDS, "parent": "0" * 20}  # published once more, when another one was the latest
    assert save_snapshot(saved.folder.parent, **{**content, "fields": child}).id == saved.id
    other = save_snapshot(saved.folder.parent, **{**content, "fields": {**FIELDS, "campaign": "b"}})
    assert other.id != saved.id


@pytest.mark.parametrize("name", ["manifest.json", "heads-cpu-1t-train.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "one bit"])
def test_damage_to_any_file_is_refused(saved, name, damage):
    path = saved.folder / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[:-9])
    else:
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    with pytest.raises(SnapshotError) as caught:
        load_snapshot(saved.folder)
    assert "\n" not in str(caught.value)
    assert str(saved.folder) in str(caught.value)
    with pytest.raises(SnapshotError):
        copy_snapshot(saved.folder, saved.folder.parent / "copy")
    assert not (saved.folder.parent / "copy").exists()


MANY = [f"device-{number}" for number in range(1_001)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not the manifest of a TraPPM snapshot"),
        ({"format_version": 99}, "format version 99"),
        ({"files": {"../../etc/passwd": {"sha256": "0", "bytes": 1}}}, r"is files\.\.\."),
        ({"cards": {"v100-16gb": "h100"}}, "is cards: .* v100-16gb is no h100"),
        ({"cards": {"mine": "red\x1b[31m"}}, "is cards.mine: .* characters that cannot be printed"),
        ({"cards": dict.fromkeys(MANY, "v100")}, "cards has 1,001 devices; at most 1,000"),
        ({"feature_schema": {}}, "other features of graph and memory and kernels"),
        (
            {"heads": {"cpu-2t": {"train": {"kind": "physics", "heads": {"speed": "graph"}}}}},
            r"is heads\.",
        ),
    ],
)
def test_an_invalid_manifest_is_refused_even_with_a_valid_checksum(saved, changes, message):
    rewrite(saved.folder, **changes)
    with pytest.raises(SnapshotError, match=message):
        load_snapshot(saved.folder)


def test_huge_layer_widths_and_unknown_kinds_of_heads_are_refused(saved):
    manifest = copy.deepcopy(saved.manifest.to_json())
    preset, heads = manifest["preset"], manifest["heads"]
    preset["encoder"]["widths"] = [10**6, 10**6, 8, 8]  # would be 4 TB of weights
    rewrite(saved.folder, preset=preset)
    with pytest.raises(SnapshotError, match="does not fit"):
        assert load_snapshot(saved.folder).encoder
    heads["cpu-2t"]["train"]["kind"] = "networks"
    rewrite(saved.folder, heads=heads)
    with pytest.raises(SnapshotError, match="unknown kind of heads: 'networks'; publish it again"):
        load_snapshot(saved.folder)


def test_heads_are_refused_at_the_place_of_others(saved):
    """Swap two files, and seal the manifest again."""
    files = saved.manifest.to_json()["files"]
    names = [f"heads-{device}-train.safetensors" for device in ("cpu-1t", "cpu-2t")]
    first, second = (saved.folder / name for name in names)
    swapped = {first: second.read_bytes(), second: first.read_bytes()}
    for path, data in swapped.items():
        path.write_bytes(data)
    rewrite(
        saved.folder, files=files | dict(zip(names, (files[n] for n in names[::-1]), strict=True))
    )
    reason = "'cpu-2t train memory_mib,step_time_ms' in place of 'cpu-1t train memory_mib,"
    with pytest.raises(SnapshotError, match=reason):
        load_snapshot(saved.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [replace(LABELS[0], provenance="simulated")]}, "simulated"),
        ({"fields": {"label_counts": {"measured": 3, "simulated": 1}}}, "simulated"),
        ({"source_device": "a100"}, "source device 'a100'"),
    ],
)
def test_unpublishable_content_is_refused(content, tmp_path, change, message):
    with pytest.raises(SnapshotError, match=message):
        save_snapshot(tmp_path / "registry", **{**content, **change})
    assert not (tmp_path / "registry").exists()


def test_a_device_key_cannot_lead_out_of_the_folder(content, tmp_path):
    heads = {"../../up": content["heads"]["cpu-2t"], **content["heads"]}
    with pytest.raises(SnapshotError, match="cannot be part of a file name"):
        save_snapshot(tmp_path / "registry", **{**content, "heads": heads})


def test_heads_of_two_phases_are_separate_and_need_no_encoder(content, tmp_path, zoo):
    trained = [content["heads"][device][Phase.TRAIN] for device in ("cpu-2t", "cpu-1t")]
    heads = {"rtx": dict(zip((Phase.TRAIN, Phase.INFER), trained, strict=True))}
    info = save_snapshot(
        tmp_path, **{**content, "encoder": None, "heads": heads, "source_device": "rtx"}
    )
    loaded, workloads = load_snapshot(info.folder), zoo.workloads([0, 9])[0]
    for phase, expected in heads["rtx"].items():
        predicted = loaded.predict(workloads, "rtx", phase)
        np.testing.assert_allclose(
            predicted.median, expected.heads.predict(workloads).median, rtol=1e-4
        )
    with pytest.raises(SnapshotError, match="has no encoder"):
        assert loaded.encoder


def test_a_failed_write_leaves_no_files(content, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifests.os, "fsync", full)
    with pytest.raises(SnapshotError, match="No space left"):
        save_snapshot(tmp_path, **content)
    assert os.listdir(tmp_path) == []


def test_only_old_unfinished_folders_are_removed(content, tmp_path):
    stale, fresh = tmp_path / ".unfinished-a", tmp_path / ".unfinished-b"
    stale.mkdir()
    fresh.mkdir()
    os.utime(stale, (0, 0))
    info = save_snapshot(tmp_path, **content)
    assert set(tmp_path.iterdir()) == {info.folder, fresh}


def test_copy_keeps_the_id_and_never_overwrites(saved, tmp_path, zoo):
    info = copy_snapshot(saved.folder, tmp_path / "a" / "copy")
    assert info.id == saved.id
    shutil.rmtree(saved.folder)
    predicted = load_snapshot(info.folder).predict(zoo.workloads([0])[0], "cpu-2t")
    assert predicted.median.shape == (1, 2)
    with pytest.raises(SnapshotError, match="already there"):
        copy_snapshot(info.folder, info.folder)
