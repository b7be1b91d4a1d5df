"""What others published before, trained and judged by the same code as ours."""
