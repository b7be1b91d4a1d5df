"""Traces and checks of a day with a GPU (docs/gpu_day.md)."""
