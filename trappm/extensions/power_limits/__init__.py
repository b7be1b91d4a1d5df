"""Power and energy of a step by its kernels, under any power limit of a GPU."""
