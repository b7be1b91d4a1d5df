"""Allocations and kernels of steps without a device, for all batch sizes."""
