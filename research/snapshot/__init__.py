"""Training of the shipped snapshot (`python -m research snapshot`)."""
