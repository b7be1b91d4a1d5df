"""Several processes that share a training step, measured as one device."""
