"""The registry: versions and names on any fsspec place, whole whatever is killed."""

import multiprocessing
import time

import pytest
from registry_samples import write_sample

from trappm.learner.snapshots import registry
from trappm.learner.snapshots.promotion import promote
from trappm.learner.snapshots.registry import Registry, check_location
from trappm.profiler.errors import InputError, SnapshotError

KILLS = 6


@pytest.fixture
def here(tmp_path):
    return tmp_path / "here"


@pytest.fixture(params=["folder", "s3"])
def there(request, tmp_path):
    """An empty registry elsewhere: a folder, or a bucket."""
    if request.param == "s3":
        return Registry(f"{request.getfixturevalue('s3_bucket')}/snapshots")
    return Registry(tmp_path / "there")


def test_pushed_snapshots_are_listed_and_pulled_unchanged(here, there, tmp_path):
    first, second = (write_sample(here, number) for number in (1, 2))
    assert there.ids() == []
    assert {there.push(here / name) for name in (first, second, first)} == {first, second}
    assert there.ids() == sorted([first, second])
    there.pull(second, tmp_path / "copy")
    for path in (here / second).iterdir():
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()
    assert there.resolve(first[:8]) == first
    with pytest.raises(SnapshotError, match=f"there are: .*{first}"):
        there.resolve("nope")


def test_aliases_move_and_keep_their_history(here, there):
    ids = [there.push(here / write_sample(here, number)) for number in range(3)]
    for name in ids:
        there.set_alias("latest", name, "published")
    there.set_alias("stable", ids[0], "by hand")
    assert there.aliases() == {"latest": ids[2], "stable": ids[0]}
    assert there.meanings("latest") == ids[::-1]
    assert there.meanings("nobody") == []
    there.set_alias("latest", ids[0], "by hand")
    assert there.meanings("latest") == [ids[0], ids[2], ids[1]]
    assert [entry.why for entry in there.history("stable")] == ["by hand"]
    for bad in ("../up", "", "a b", ids[0]):
        with pytest.raises(SnapshotError, match="cannot be an alias"):
            there.set_alias(bad, ids[0], "by hand")
    with pytest.raises(SnapshotError, match=r"there is no snapshot .*see: trappm snapshot show"):
        there.set_alias("latest", "0" * 20, "by hand")


@pytest.mark.parametrize(
    ("families", "mape", "moves", "message"),
    [
        (["resnet", "vit"], 5.9, True, ""),
        (["resnet", "vit"], 6.1, False, "regressed: a100 train memory_mib was 5 % off, is 6"),
        (["bert", "gpt2"], 1.0, False, "a pool without resnet, vit: errors cannot be compared"),
        (["gpt2", "resnet", "vit"], 5.5, True, ""),
        (["gpt2", "resnet", "vit"], 9.0, True, "gpt2, too, so that errors differ: a100 train"),
        (["gpt2", "resnet", "vit"], 11.0, False, "regressed, though its pool has gpt2, too"),
        (None, 9.0, False, "regressed"),  # of a version that did not write it down
    ],
)
def test_a_snapshot_is_not_promoted_if_errors_rise_or_a_family_is_missing(
    here, tmp_path, families, mape, moves, message
):
    there = Registry(tmp_path / "there")
    before = there.push(here / write_sample(here, 1, families=["resnet", "vit"]))
    after = there.push(here / write_sample(here, 2, mape, families=families))
    promote(there, "latest", before)
    promotion = promote(there, "latest", after)
    assert (promotion.moved, message in promotion.message) == (moves, True)
    assert "\n" not in promotion.message
    assert (promotion.remark is not None) == (moves and message != "")
    assert there.resolve("latest") == (after if moves else before)


FAMILIES = ["resnet", "vit"]


@pytest.mark.parametrize(
    ("snapshots", "message"),
    [
        ([{"metrics": ("memory_mib", "step_time_ms")}, {}],
         "has no head of a100 train step_time_ms"),
        # Errors are compared within a phase,
        ([{"phase": "infer"}, {"phase": "train", "mape": 50.0}, {"phase": "infer", "mape": 50.0}],
         "a100 infer memory_mib was 5 % off, is 50 %"),
        # and with the last snapshot that still answers for the device.
        ([{"families": FAMILIES}, {"mape": 50.0, "families": ["gpt2"], "device": "h100"},
          {"mape": 9.0, "families": FAMILIES}],
         "regressed: a100 train memory_mib was 5 % off, is 9 %"),
    ],
)  # fmt: skip
def test_only_the_last_of_several_snapshots_is_not_promoted(here, tmp_path, snapshots, message):
    there = Registry(tmp_path / "there")
    ids = [
        there.push(here / write_sample(here, number, **options))
        for number, options in enumerate(snapshots, start=1)
    ]
    promotions = [promote(there, "latest", name) for name in ids]
    assert [promotion.moved for promotion in promotions] == [True] * (len(ids) - 1) + [False]
    assert message in promotions[-1].message
    assert there.resolve("latest") == ids[-2]


def test_encoders_are_cached_next_to_snapshots(here, tmp_path, monkeypatch):
    there = Registry(tmp_path / "there")
    there.push(here / (name := write_sample(here)))
    assert there.read_file("encoder-1.safetensors") is None
    for data in (b"first", b"second"):
        there.cache("encoder-1.safetensors", data)
        assert there.read_file("encoder-1.safetensors") == data
    assert (there.ids(), there.aliases()) == ([name], {})
    monkeypatch.setattr(registry, "MAX_SNAPSHOT_BYTES", 5)
    with pytest.raises(SnapshotError, match=r"encoder-1\.safetensors has more than 5 bytes"):
        there.read_file("encoder-1.safetensors")


def test_an_interrupted_push_is_continued(here, tmp_path, monkeypatch):
    there = Registry(f"memory://{tmp_path}")
    name, write = write_sample(here), Registry._write

    def cut(self, path, data):
        if path.endswith("manifest.json"):
            raise KeyboardInterrupt
        write(self, path, data)

    monkeypatch.setattr(Registry, "_write", cut)
    with pytest.raises(KeyboardInterrupt):
        there.push(here / name)
    assert there.ids() == []
    monkeypatch.undo()
    assert there.push(here / name) == name
    there.contents(name)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("snapshots", "'snapshots' is not an absolute folder"),
        ("nosuch://bucket", "fsspec knows no protocol 'nosuch'"),
        ("sftp://me:secret@host/path", "'sftp://***@host/path' has a user or a query"),
        ("s3://bucket/path?token=secret", "'s3://bucket/path' has a user or a query"),
    ],
)
def test_a_location_that_others_cannot_share_is_refused(location, message):
    with pytest.raises(InputError) as error:
        check_location(location)
    assert message in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)
    check_location("/shared/snapshots")
    check_location("s3://bucket/path")


def test_a_damaged_copy_is_reported_and_not_replaced(here, tmp_path):
    name = write_sample(here)
    Registry(here).pull(name, tmp_path / name)
    (tmp_path / name / "heads-a-1.safetensors").write_bytes(b"{}")
    with pytest.raises(SnapshotError, match=r"is damaged: .*; remove it, then pull"):
        Registry(here).pull(name, tmp_path / name)


def test_a_file_that_was_changed_in_the_registry_is_not_pulled(here, tmp_path):
    name = write_sample(here)
    file = here / name / "heads-a-1.safetensors"
    file.write_bytes(bytes(reversed(file.read_bytes())))
    with pytest.raises(SnapshotError, match=r"heads-a-1\.safetensors"):
        Registry(here).contents(name)
    with pytest.raises(SnapshotError):
        Registry(here).pull(name, tmp_path / name)
    assert not (tmp_path / name).exists()


FORK = multiprocessing.get_context("fork")  # a fresh interpreter would take seconds to start


def push(registry, place, pipe):
    pipe.send("ready")
    Registry(registry).push(place)
    Registry(registry).set_alias("latest", place.name, "")
    pipe.send("done")


def pull(registry, place, pipe):
    pipe.send("ready")
    Registry(registry).pull(place.name, place)
    pipe.send("done")


@pytest.mark.parametrize("work", [push, pull])
def test_a_killed_push_or_pull_leaves_only_complete_snapshots(tmp_path, work):
    """Processes are killed later and later."""
    source, target = tmp_path / "source", tmp_path / "target"
    name = write_sample(source, size=400_000)
    registry, place = (target, source / name) if work is push else (source, target / name)
    for delay_s in (0.003 * attempt for attempt in range(KILLS)):
        pipe, theirs = FORK.Pipe()
        process = FORK.Process(target=work, args=(registry, place, theirs))
        process.start()
        assert pipe.recv() == "ready"
        time.sleep(delay_s)
        process.kill()
        process.join()
        seen = Registry(target)
        for snapshot_id in (*seen.ids(), *seen.aliases().values()):
            seen.contents(snapshot_id)
        if pipe.poll():
            break
    work(registry, place, theirs)  # and continues
    assert Registry(target).ids() == [name]
    Registry(target).contents(name)


def test_an_alias_moves_on_even_if_the_clock_went_back(here, tmp_path):
    there = Registry(tmp_path / "there")
    first, second = (there.push(here / write_sample(here, n)) for n in (1, 2))
    there.set_alias("latest", first, "published")
    (entry,) = (tmp_path / "there" / "aliases" / "latest").iterdir()
    entry.rename(entry.with_name(f"2999{entry.name[4:]}"))
    there.set_alias("latest", second, "published")
    assert there.resolve("latest") == second
