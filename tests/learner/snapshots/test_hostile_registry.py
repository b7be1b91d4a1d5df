"""A registry in which somebody else may write: what is odd is named, all else stays usable."""

import contextlib
import copy
import json
import os
import shutil

import pytest
from registry_samples import write_sample

import trappm.cli
from trappm.cli.snapshot import print_manifest
from trappm.learner.snapshots.manifest import entries, seal
from trappm.learner.snapshots.promotion import regressions
from trappm.learner.snapshots.registry import Registry
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.prediction.selection import SHIPPED
from trappm.profiler.errors import SnapshotError
from trappm.snapshots import head_rows, list_snapshots

ODD = (5, "x", None, [], {}, [[1]], {"a": 5}, True, -1, 10**400, 1e308, 10**9)


NAMED = {"heads": 2, "errors": 2, "files": 1, "by_family": 1}
"""So many keys below these are names: of a device and a phase, of a file, of a family."""


def places(value):
    """The paths of values, one of each kind: heads and items of lists have one shape."""
    kinds = {}
    for path in _places(value):
        kind = ["*" if isinstance(key, int) else key for key in path]
        for at, key in enumerate(path):
            if key in NAMED and (at == 0 or key == "by_family"):
                names = kind[at + 1 : at + 1 + NAMED[key]]
                kind[at + 1 : at + 1 + NAMED[key]] = ["*"] * len(names)
        kinds.setdefault(tuple(kind), path)
    return kinds.values()


def _places(value, path=()):
    """The paths of all values, of long lists and mappings only some."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in list(value)[:12] if len(path) < 2 else list(value)[:3]:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 2)):
            yield from _places(value[index], (*path, index))


def changed(manifest, path, odd):
    other = copy.deepcopy(manifest)
    part = other
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = odd
    return seal(other)


def put(registry, manifest):
    """As somebody would who wants it to be taken for a snapshot."""
    folder = registry / manifest["id"]
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest["id"]


@pytest.fixture
def shipped():
    return json.loads((SHIPPED / "manifest.json").read_text())


@pytest.fixture
def place(tmp_path):
    return tmp_path / "registry"


def test_odd_manifest_fields_do_not_hide_other_snapshots(place, shipped):
    good = write_sample(place)
    registry = Registry(place)
    reference = registry.manifest(good)
    refused = 0
    for number, path in enumerate(places(shipped)):
        if path[0] in {"id", "checksum"}:
            continue
        name = put(place, changed(shipped, path, ODD[number % len(ODD)]))
        rows = {row.id: row for row in list_snapshots(registry, with_shipped=False)}
        assert rows[good].damage is None
        if damage := rows[name].damage:
            assert "\n" not in damage
            refused += 1
        else:
            manifest = registry.manifest(name)
            print_manifest(manifest)
            head_rows(manifest)
            regressions(reference, manifest)
        shutil.rmtree(place / name)
    assert refused > 12


def test_odd_head_settings_raise_only_snapshot_errors(place, shipped):
    head = ("heads", "rtx3090", "infer")
    settings = [head + path for path in places(shipped["heads"]["rtx3090"]["infer"])]
    presets = (("preset", *path) for path in places(shipped["preset"]))
    for number, path in enumerate((*settings, *presets)):
        name = put(place, changed(shipped, path, ODD[number % len(ODD)]))
        for file in SHIPPED.glob("*.safetensors"):
            os.link(file, place / name / file.name)
        with contextlib.suppress(SnapshotError):
            load_snapshot(place / name)
        shutil.rmtree(place / name)


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_special_and_sparse_files_are_refused(place, kind):
    name = write_sample(place)
    heads = place / name / ("manifest.json" if kind == "sparse" else "heads-a-1.safetensors")
    heads.unlink()
    if kind == "pipe":
        os.mkfifo(heads)
    elif kind == "device":
        heads.symlink_to("/dev/zero")
    else:
        with heads.open("wb") as file:
            file.truncate(4 << 30)
    for look in (Registry(place).contents, lambda name: load_snapshot(place / name)):
        with pytest.raises(SnapshotError, match="damaged"):
            look(name)


def test_manifests_of_huge_or_reserved_files_are_refused(place, shipped):
    files = {f"heads-{n}.safetensors": {"sha256": "0" * 64, "bytes": 1 << 28} for n in range(64)}
    name = put(place, seal({**shipped, "files": files}))
    with pytest.raises(SnapshotError, match="more than 256 MiB together"):
        Registry(place).contents(name)
    name = put(place, seal({**shipped, "files": {"manifest.json": entries({"a": b""})["a"]}}))
    with pytest.raises(SnapshotError, match=r"names a file 'manifest\.json'"):
        Registry(place).manifest(name)


@pytest.mark.parametrize(
    "content",
    [b"[" * 60_000, b'{"at": 5, "why": "x", "restores": null}', None],
    ids=["deep", "type", "pipe"],
)
def test_an_unreadable_alias_entry_does_not_hide_the_alias(place, content):
    registry = Registry(place)
    name = write_sample(place)
    registry.set_alias("stable", name, "by hand")
    (entry,) = (place / "aliases" / "stable").iterdir()
    entry.unlink()
    os.mkfifo(entry) if content is None else entry.write_bytes(content)
    assert registry.aliases() == {"stable": name}
    assert registry.resolve("stable") == name
    assert [row.id for row in list_snapshots(registry, with_shipped=False)] == [name]
    with pytest.raises(SnapshotError, match=entry.name):
        registry.history("stable")


SECRET = "s3cret"  # noqa: S105


@pytest.mark.parametrize(
    "url",
    [
        f"nosuch://user:{SECRET}@host/bucket",
        f"http://127.0.0.1:1/x?token={SECRET}",
        f"simplecache::ftp://user:{SECRET}@127.0.0.1:1/x",
    ],
)
def test_passwords_in_registry_urls_are_not_printed(url, capsys):
    assert trappm.cli.run(["snapshot", "show", "--registry", url]) == 2
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    assert "cannot be used" in err
    assert err.count("\n") == 1
