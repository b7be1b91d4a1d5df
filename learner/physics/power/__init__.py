"""The power that a step draws, and how long it takes under a power limit."""
