"""Many devices at once: constants fitted together, and what is known of a new device."""
