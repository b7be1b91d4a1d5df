"""Training steps shared by several GPUs: measured as one device, and predicted by their links."""
