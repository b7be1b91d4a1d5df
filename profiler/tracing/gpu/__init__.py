"""What a GPU does otherwise than the meta device, by subject."""
