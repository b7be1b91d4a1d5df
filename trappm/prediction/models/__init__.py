"""Models that questions are about: told apart, traced where nobody did before, and kept."""
