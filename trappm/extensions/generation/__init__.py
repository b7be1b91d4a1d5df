"""What it costs a decoder to read prompts and to write after them."""
