"""What a device reaches at best, and how near to that the kernels of a step come."""
