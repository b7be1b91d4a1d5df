"""A campaign whose pool is traced, and encoders that are made at once."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from trappm.cluster.spec import parse_spec
from trappm.learner.paper.presets import LAPTOP, PRESETS
from trappm.profiler.records import Configuration
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import TraceKey

NAMES = ("test_resnet", "test_vit", "test_efficientnet")
HELD_OUT = "test_vit"
POOL = [
    Configuration(architecture=name, batch_size=batch, input_size=64)
    for name in NAMES
    for batch in (1, 2, 4)
]
SPEC = """
name: seen
devices: {source: cpu-2t}
evaluation: {source: 2}
initial: {source: 4}
rounds: {count: 2, source: 1}
stop: {target_mape: {step_time_ms: 10}, price_per_gpu_hour: 2.5}
pool:
  groups:
    - {architectures: [test_resnet, test_vit, test_efficientnet], batch_sizes: [1, 2, 4],
       input_sizes: [64]}
"""


@contextmanager
def hasty_encoders():
    """Encoders hardly learn meanwhile: where points lie does not matter."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("laptop", "paper"):
            encoder = replace(LAPTOP.encoder, steps=1)
            patch.setitem(PRESETS, name, replace(PRESETS[name], encoder=encoder))
        yield patch


def new_campaign(store, name="seen"):
    """The id of a campaign with this pool, whose steps are traced."""
    spec = parse_spec(SPEC, origin="the test")
    for architecture in NAMES:
        store.traces.put(TraceKey(architecture, 64), trace(architecture, 64))
    campaign_id = store.campaigns.create(name, spec.model_dump(mode="json"), spec.seed).id
    store.campaigns.set_pool(campaign_id, [(c, c.architecture == HELD_OUT) for c in POOL])
    return campaign_id
