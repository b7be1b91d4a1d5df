"""A link fitted to collectives: it is what they were made by, and says how far it is off."""

from dataclasses import replace

import numpy as np
import pytest

from trappm.extensions.parallel.link_fit import TimedCollective, collectives_of, fitted_link
from trappm.extensions.parallel.links import LinkKind, link
from trappm.extensions.parallel.ranks_device import collectives
from trappm.profiler.kernels.kernel_call import KernelMeasurement
from trappm.profiler.records import Outcome, Protocol

USUAL = link(LinkKind.NVLINK, 300.0)
OWN = replace(USUAL, latency_us=90.0, efficiency=0.3, sharpness=0.9)


def made_by(own, ranks=(4,), noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    rows = []
    for count in ranks:
        for call in collectives(count, 16 * 1024):
            row = TimedCollective(call.operator, count, 4.0 * call["elements"], 1.0)
            scatter = float(np.exp(noise * random.normal()))
            rows.append(replace(row, time_ms=row.predicted_ms(own) * scatter))
    return rows


def test_fit_recovers_the_link_of_simulated_collectives():
    fitted = fitted_link(USUAL, made_by(OWN))
    assert fitted.latency_us == pytest.approx(90.0, rel=0.05)
    assert fitted.efficiency == pytest.approx(0.3, rel=0.05)
    assert fitted.spread <= 0.06
    assert fitted.gbs == USUAL.gbs


def test_fit_is_robust_and_spread_reflects_noise():
    noisy = fitted_link(USUAL, made_by(OWN, noise=0.3))
    assert 0.15 < noisy.spread < 0.6
    rows = made_by(OWN)
    rows[::9] = [replace(row, time_ms=20 * row.time_ms) for row in rows[::9]]
    assert fitted_link(USUAL, rows).efficiency == pytest.approx(0.3, rel=0.2)


def test_hop_latency_needs_two_numbers_of_ranks():
    start = replace(USUAL, hop_us=5.0)
    own = replace(start, hop_us=20.0)
    assert fitted_link(start, made_by(own)).hop_us == 5.0
    assert fitted_link(start, made_by(own, (2, 4, 8))).hop_us == pytest.approx(20.0, rel=0.1)


def test_too_few_or_only_small_collectives_give_no_link():
    rows = made_by(OWN)
    assert fitted_link(USUAL, []) is None
    assert fitted_link(USUAL, rows[-5:]) is None
    assert fitted_link(USUAL, [row for row in rows if row.size_bytes < 1 << 20]) is None


def test_only_successful_collectives_are_used():
    def measured(call, outcome):
        return KernelMeasurement(
            call=call, device="a100x4", outcome=outcome, protocol=Protocol(name="kernels"),
            started_at="2026-11-24T12:00:00+00:00", duration_s=1.0, time_ms=2.0,
        )  # fmt: skip

    first, second = collectives(4, 1024)[:2]
    rows = [measured(first, Outcome.OK), measured(second, Outcome.UNSTABLE)]
    assert [row.size_bytes for row in collectives_of(rows)] == [1024.0]
