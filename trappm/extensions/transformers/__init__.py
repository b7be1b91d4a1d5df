"""Hugging Face transformers by configuration (`hf:gpt2`), their step times, and generation."""
