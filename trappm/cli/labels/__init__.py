"""`trappm labels` and what stands under it."""
