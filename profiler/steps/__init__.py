"""One training or inference step: run, timed, and judged."""
