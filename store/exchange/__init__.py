"""Measurements to and from files, and what others published."""
