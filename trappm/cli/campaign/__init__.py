"""`trappm campaign` and what stands under it."""
