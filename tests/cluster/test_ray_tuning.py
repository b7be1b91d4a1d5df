"""Workers on Ray share a study."""

import numpy as np
import pytest

from trappm.cluster.ray_tuning import tune_on_ray
from trappm.learner.bench.benchmark import Samples
from trappm.learner.bench.tuning import Tuning
from trappm.learner.workload import Workload
from trappm.profiler.records import Configuration, Graph
from trappm.store import Store


def chain(length, batch_size):
    """A graph of so many convolutions in a row."""
    shape = np.tile([batch_size, 8, 4, 4, 0, 0], (length, 1))
    return Graph(
        operators=("Conv",) * length,
        edges=np.array([(i, i + 1) for i in range(length - 1)], dtype=np.int64),
        input_shapes=shape,
        output_shapes=shape,
        macs=np.full(length, 1000 * batch_size),
        parameters=np.full(length, 64),
        memory_bytes=np.full(length, 512 * batch_size),
        batch_size=batch_size,
    )


@pytest.mark.slow
def test_workers_share_a_study(tmp_path):
    rows = [(length, batch) for length in range(2, 22) for batch in (1, 2, 4)]
    samples = Samples(
        configurations=[
            Configuration(architecture=f"resnet{n}", batch_size=b, input_size=4) for n, b in rows
        ],
        workloads=[Workload(graph=chain(*row)) for row in rows],
        values=np.array([float(n * b) for n, b in rows]),
        above=np.full(len(rows), np.nan),
        judged=np.ones(len(rows), dtype=bool),
        spiked=np.zeros(len(rows), dtype=bool),
    )
    url = f"sqlite:///{tmp_path / 'labels.db'}"
    Store.open(url).close()
    messages = []
    report = tune_on_ray(
        Tuning("shared", url, "xgboost", samples, None), 6, workers=2, address=None,
        on_trial=lambda *p: messages.append(p),
    )  # fmt: skip
    assert 6 <= sum(report["trials"].values()) <= 7
    assert report["trials"]["fail"] == 0
    assert messages[-1][:2] == (6, 6)
