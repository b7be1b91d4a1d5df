"""Predictions, comparisons, advice and labels as tools of the Model Context Protocol."""
