"""Advice on how a training step fits a GPU or ends in time, and a guard for launch scripts."""
