"""Multi-GPU training steps, measured as one device and predicted from their links."""
