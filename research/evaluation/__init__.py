"""Evaluation of predictors on held-out labels (`python -m research evaluate`)."""
