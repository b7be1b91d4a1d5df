"""Statistics of any metric: kernels, Student-t errors, folds, Gaussian process, calibration."""
