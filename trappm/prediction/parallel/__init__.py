"""Questions about many GPUs: a step that they share, and how it scales."""
