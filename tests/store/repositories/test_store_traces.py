"""Both homes of the cache of traced steps: a folder, and the label store with its queries."""

from dataclasses import replace

import pytest
from sqlalchemy import text
from store_samples import contents, graph_only, template, trace

from trappm.profiler import traced_step
from trappm.profiler.records import Execution, MemoryFormat, Phase, Precision
from trappm.profiler.traced_step import Refusal, Trace, TraceFolder, TraceKey, TraceSettings
from trappm.store import Store
from trappm.store.traces import SqlTraces

KEY, OTHER = TraceKey("resnet18", 64), TraceKey("resnet34", 64)


class FolderHome:
    def __init__(self, folder):
        self.folder = folder

    def opened(self, **limit):
        return TraceFolder(self.folder, **limit)

    def damage(self):
        for path in self.folder.iterdir():
            path.write_bytes(path.read_bytes()[:-20])


class SqlHome:
    def __init__(self, store):
        self.store = store

    def opened(self, **limit):
        return SqlTraces(self.store.database, **limit)

    def damage(self):
        with self.store.database.writing() as session:
            session.execute(text("UPDATE traces SET data = substr(data, 1, length(data) - 20)"))


@pytest.fixture(params=["folder", "sqlite", "postgresql"])
def home(request, tmp_path):
    """A home of traces, opened as often as a test wants."""
    if request.param == "folder":
        yield FolderHome(tmp_path / "traces")
        return
    databases = request.getfixturevalue(f"{request.param}_databases")
    with databases.new(tmp_path) as url, Store.open(url) as store:
        yield SqlHome(store)


@pytest.fixture
def cache(home):
    return home.opened()


def test_a_cache_returns_what_was_put(cache):
    assert cache.get(KEY) is None
    assert cache.missing([KEY, OTHER]) == [KEY, OTHER]
    made = trace()
    cache.put(KEY, made)
    assert cache.get(KEY).to_bytes() == made.to_bytes()
    assert cache.missing([OTHER, KEY]) == [OTHER]
    partial = graph_only("its loss needs values")
    cache.put(OTHER, partial)
    assert cache.get(OTHER).to_bytes() == partial.to_bytes()
    cache.put(OTHER, replace(trace(), graph=None, refusal="no rule"))
    assert cache.get(OTHER).graph is None
    assert cache.get(OTHER).kernels is not None


def test_refusals_are_kept_and_replaced(cache):
    cache.put(KEY, Refusal("it loops over its samples"))
    assert cache.get(KEY) == Refusal("it loops over its samples")
    assert cache.missing([KEY]) == []
    cache.put(KEY, trace())
    assert isinstance(cache.get(KEY), Trace)


def test_damaged_entries_are_removed(home):
    cache = home.opened()
    cache.put(KEY, trace())
    cache.put(OTHER, Refusal("no graph"))
    home.damage()
    assert cache.get(KEY) is None
    assert KEY in cache.missing([KEY, OTHER])
    cache.put(KEY, trace())
    assert isinstance(cache.get(KEY), Trace)


def test_the_oldest_entries_go_beyond_the_limit(home):
    made = trace()
    keys = [TraceKey(f"model{n}", 64) for n in range(6)]
    cache = home.opened(max_bytes=3 * len(made.to_bytes()))
    for key in keys:
        cache.put(key, made)
    left = [key for key in keys if key not in cache.missing(keys)]
    assert left == keys[-len(left) :]
    assert 3 <= len(left) < len(keys)


def test_every_part_of_a_key_counts(cache):
    others = [
        TraceKey("resnet18d", 64),
        TraceKey("resnet18", 96),
        TraceKey("resnet18", 64, phase=Phase.INFER),
        TraceKey("resnet18", 64, TraceSettings(precision=Precision.AMP_FP16)),
        TraceKey("resnet18", 64, TraceSettings(memory_format=MemoryFormat.CHANNELS_LAST)),
        TraceKey("resnet18", 64, TraceSettings(execution=Execution.COMPILE)),
        TraceKey("resnet18", 64, TraceSettings(fused_attention=False)),
    ]
    cache.put(KEY, trace())
    assert cache.missing([KEY, *others]) == others


def test_another_version_of_a_library_needs_a_new_trace(cache, monkeypatch):
    cache.put(KEY, trace())
    cache.put(OTHER, Refusal("no rule for it"))
    monkeypatch.setattr(traced_step, "library_versions", lambda: ("2.99", "1.0"))
    assert cache.missing([KEY, OTHER]) == [KEY, OTHER]
    assert cache.get(KEY) is None
    cache.put(KEY, trace(frozen=3))
    assert cache.get(KEY).to_bytes() == trace(frozen=3).to_bytes()
    monkeypatch.undo()
    assert cache.get(KEY).to_bytes() == trace().to_bytes()


def test_equal_graphs_are_stored_once(store, database_url):
    half = TraceKey("resnet18", 64, TraceSettings(precision=Precision.AMP_FP16))
    for key in (KEY, half, OTHER):
        store.traces.put(key, trace())
    assert len(contents(database_url)["graphs"]) == 1
    assert store.traces.graphs_of_size(2) == {template().content_hash: template().to_bytes()}
    assert store.traces.graphs_of_size(3) == {}
    graphs = store.traces.graphs([KEY, half, TraceKey("vgg11", 64)])
    assert graphs == dict.fromkeys([KEY, half], template().to_bytes())
    steps = store.traces.steps([KEY, half])
    assert Trace.from_bytes(steps[half]).kernels.parameters == trace().kernels.parameters


def test_pairs_are_found_by_graph_and_by_step(store):
    store.traces.put(KEY, trace())
    store.traces.put(OTHER, trace())
    store.traces.put(TraceKey("frozen", 64), trace(frozen=7))
    store.traces.put(TraceKey("wide", 64), trace(template(macs=99)))
    store.traces.put(TraceKey("infer", 64, phase=Phase.INFER), trace(phase=Phase.INFER))
    pairs = {(name, 64) for name in ("resnet18", "resnet34", "frozen", "infer")}
    assert store.traces.pairs_of_graph(template().content_hash) == pairs
    assert store.traces.pairs_of_step(KEY, trace()) == {("resnet18", 64), ("resnet34", 64)}
    half = KEY._replace(settings=TraceSettings(precision=Precision.AMP_FP16))
    assert store.traces.pairs_of_step(half, trace()) == set()
