"""Predictions over HTTP: the same questions and answers as `trappm predict`, for many callers."""
