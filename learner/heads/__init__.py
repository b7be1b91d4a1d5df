"""Predictors of the metrics of a device, and what they answer."""
