"""Power of a step, and its time under a power limit."""
