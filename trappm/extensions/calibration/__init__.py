"""Calibration: a snapshot for one device and its software from a handful of measured steps."""
