"""NVIDIA GPUs: CUDA, events, sensors and neighbours by NVML."""
