"""Research around TraPPM: evaluations, fitted constants, the shipped snapshot and their data."""
