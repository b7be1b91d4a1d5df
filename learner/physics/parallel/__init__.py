"""Training on many GPUs: collectives over links, schedules of strategies, memory of a rank."""
