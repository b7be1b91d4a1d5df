"""What a training step costs on the cores of a CPU, which have no allocator and no launches."""
