"""Functions that this extension adds to `import trappm`, by the module that defines each."""

FUNCTIONS = {"calibrate": "trappm.extensions.calibration.calibrating"}
"""Calibration of predictions to a device by a handful of its steps."""
