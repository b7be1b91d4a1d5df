"""Steps on many GPUs on the terminal."""
