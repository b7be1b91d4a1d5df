"""A package with modules of one's own, for examples/own_modules.yaml."""
