"""Differences between a GPU and the meta device, by subject."""
