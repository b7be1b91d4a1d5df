"""The default learner on workloads with kernels: prior, residual and interval together."""

import numpy as np
import pytest
import torch
from kernel_samples import networks
from workload_samples import mape, targets

from trappm.learner.heads.physics_heads import Ours, starting_prior
from trappm.learner.physics.step_time import PRODUCT_KINDS, StepTimePrior
from trappm.profiler.devices.catalogue import spec_of
from trappm.profiler.traced_step import KernelKind, Size

torch.set_num_threads(1)

SPEC = spec_of("rtx3090")
EFFICIENCY = {KernelKind.POINTWISE: 0.5, KernelKind.DENSE: 0.7, KernelKind.LINEAR: 0.8}
"""Share of the peak that kernels of a kind reach."""
SHARE_OF_BANDWIDTH = {KernelKind.BATCH_NORM: 0.6, KernelKind.ELEMENTWISE: 0.9, KernelKind.COPY: 0.4}
NOISE = 0.03


def measured_ms(workload, random):
    """A step time that is not of the prior's form.

    Each kernel runs at a fixed share of a peak. The step is then shortened or lengthened by how
    much of it normalizes and copies, as if kernels ran side by side and a cache were shared. The
    prior is a sum over kernels and has no such interaction.
    """
    kernels = workload.kernels.at(workload.batch_size)
    table, sizes = kernels.table, kernels.sizes
    bytes_ = sizes[:, Size.READ_BYTES] + sizes[:, Size.WRITTEN_BYTES]
    kinds = [KernelKind(kind) for kind in table.kinds]
    multiplies = table.kinds < PRODUCT_KINDS
    of_peak = np.array([EFFICIENCY.get(kind, 1.0) for kind in kinds])
    of_bandwidth = np.array([SHARE_OF_BANDWIDTH.get(kind, 0.8) for kind in kinds])
    arithmetic = multiplies * sizes[:, Size.FLOPS] / (SPEC.half_tflops * 1e9 * of_peak)
    traffic = bytes_ / (SPEC.bandwidth_gbs * 1e6 * of_bandwidth)
    each = table.counts * (np.hypot(arithmetic, traffic) + 0.004)
    share = {kind: each[table.kinds == kind].sum() / each.sum() for kind in set(kinds)}
    normalizes, copies, linear = (
        share.get(kind, 0.0) for kind in (KernelKind.BATCH_NORM, KernelKind.COPY, KernelKind.LINEAR)
    )
    interaction = 1.5 * normalizes * copies - 0.8 * linear * normalizes + 0.3 * (linear > 0.4)
    return float(each.sum() * np.exp(interaction + NOISE * random.normal()))


@pytest.fixture(scope="module")
def judged():
    """The default learner, fitted to 80 networks, with 80 others and the labels of both."""
    random = np.random.default_rng(7)
    workloads = networks(160, seed=12)
    values = np.array([measured_ms(workload, random) for workload in workloads])
    names = [f"network {number}" for number in range(len(workloads))]
    start = starting_prior("step_time_ms", SPEC, kernels=True)
    assert isinstance(start, StepTimePrior)
    head = Ours(start).fit(workloads[:80], targets(values[:80], names[:80]), random)
    return start, head, workloads[80:], values[80:]


def test_a_trained_head_beats_its_prior_on_unseen_networks(judged):
    start, head, workloads, values = judged

    def error(logs):
        return float(np.mean(np.abs(np.exp(logs) / values - 1)))

    untrained = error(start.log_values(workloads))
    prior = error(head.prior.log_values(workloads))
    trained = mape(head, workloads, values)
    assert prior < untrained / 2
    assert trained < 0.95 * prior  # a smooth residual misses the step in `measured_ms`


def test_intervals_have_the_promised_coverage(judged):
    _, head, workloads, values = judged
    estimate = head.predict(workloads)
    inside = np.mean((estimate.low <= values) & (values <= estimate.high))
    assert 0.8 <= inside <= 0.99
    assert np.median(estimate.high / estimate.low) < 1.6
