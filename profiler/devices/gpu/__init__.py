"""NVIDIA GPUs through NVML and CUDA."""
