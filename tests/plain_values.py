"""Comparison of plain values, as JSON has them, with a tolerance."""

import pytest


def assert_equal(now, recorded, tolerance, path=""):
    """Compare plain values; an error names the place of the first that differs."""
    assert type(now) is type(recorded), path
    if isinstance(recorded, dict):
        assert now.keys() == recorded.keys(), path
        for key, value in recorded.items():
            assert_equal(now[key], value, tolerance, f"{path}.{key}")
    elif isinstance(recorded, list | tuple):
        assert len(now) == len(recorded), path
        for place, (mine, value) in enumerate(zip(now, recorded, strict=True)):
            assert_equal(mine, value, tolerance, f"{path}[{place}]")
    elif isinstance(recorded, float):
        assert now == pytest.approx(recorded, rel=tolerance), path
    else:
        assert now == recorded, path
