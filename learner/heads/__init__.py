"""Predictors of the metrics of a device, and their predictions."""
