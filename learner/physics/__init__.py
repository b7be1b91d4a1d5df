"""Formulas for memory, time and power with few constants: where learning starts."""
