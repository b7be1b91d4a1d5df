"""The dynamic profile: one trusted measurement, and many in a row."""
