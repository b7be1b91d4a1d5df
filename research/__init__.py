"""Evaluations, fitted constants, the shipped snapshot and their data."""
