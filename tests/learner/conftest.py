"""Fixtures of made-up networks."""

from network_zoo import build_network, measure, small, zoo

__all__ = ["build_network", "measure", "small", "zoo"]
