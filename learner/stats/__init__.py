"""Statistics that know nothing of models: Gaussian processes, calibration."""
