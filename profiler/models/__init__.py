"""Models by name: families, inputs, and pools of configurations."""
