"""Which graph nodes each operator of PyTorch stands for."""
