"""Measurements in a process of their own, one or many in a row."""
