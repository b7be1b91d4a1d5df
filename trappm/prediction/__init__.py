"""From a question about a model to its predicted cost."""
