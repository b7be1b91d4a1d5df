"""Rooflines of devices, and the kernels of a step relative to them."""
