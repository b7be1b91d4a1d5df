"""Single kernels with shapes and types, timed on a device or traced."""
