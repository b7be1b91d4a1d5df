"""One trace of a step that never ran: its graph, its allocations and its kernels."""
