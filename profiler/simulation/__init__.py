"""Steps without a device: their allocations and their kernels, traced once for all batch sizes."""
