"""Ray actors, and the handles that the campaign uses for them."""
