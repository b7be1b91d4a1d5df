"""Fits of the shipped constants to published labels (`python -m research fit-priors`)."""
