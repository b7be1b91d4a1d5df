"""Tuning of a predictor's settings (`python -m research tune`)."""
