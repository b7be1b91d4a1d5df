"""Campaigns and predictions see the same step of a model, also after an update of a library."""

from fakes import FakeWorkers, ran

import trappm
from trappm.cluster.trace_tasks import trace_of
from trappm.prediction import models as subjects
from trappm.profiler import traced_step
from trappm.profiler.traced_step import TraceFolder, TraceKey
from trappm.store import Home

KEY = TraceKey("test_resnet", 64)
POOL = {
    "architectures": ["test_resnet", "test_vit", "test_efficientnet", "test_convnext"],
    "batch_sizes": [1, 2, 4],
    "input_sizes": [64],
}


def test_an_update_of_a_library_is_seen_by_campaigns_and_predictions_alike(
    store, monkeypatch, tmp_path
):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    predictions = TraceFolder(Home.open().traces)

    def ask(batch_size):
        trappm.predict(
            KEY.model, input_size=KEY.input_size, batch_size=batch_size, device="a100",
            precision="fp32", optimizer="sgd",
        )  # fmt: skip

    def launch():
        workers = FakeWorkers(trace_of=trace_of)
        ran(store, workers, pool={"groups": [POOL]})
        return workers.traced

    ask(batch_size=2)
    assert KEY in launch()
    assert launch() == []
    first = store.traces.get(KEY).to_bytes()
    assert predictions.get(KEY).to_bytes() == first

    monkeypatch.setattr(traced_step, "library_versions", lambda: ("2.99",))
    subjects._architecture.cache_clear()  # as in a new process, which has the new library
    assert predictions.missing([KEY]) == store.traces.missing([KEY]) == [KEY]
    ask(batch_size=3)
    assert KEY in launch()
    assert predictions.get(KEY).to_bytes() == store.traces.get(KEY).to_bytes()
