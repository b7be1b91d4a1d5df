"""Power of a step by its kernels."""
