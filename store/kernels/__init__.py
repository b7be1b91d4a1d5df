"""Kernel measurements, kept beside labels: the part of the store, files, what others published."""
