"""timm's models: their names, families, inputs, and pools of configurations of them."""
