"""Predictors that others published, trained and evaluated by the same code as ours."""
