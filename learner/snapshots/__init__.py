"""Heads as files without code, and the registries that they are published in."""
