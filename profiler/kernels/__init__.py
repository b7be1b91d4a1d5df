"""Kernels alone: one operator with shapes and types, run and timed on a device, or traced."""
