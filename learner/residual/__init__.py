"""Residual models of priors: a Gaussian process and boosted trees combined."""
