"""Predictions of time, memory, power and cost."""
