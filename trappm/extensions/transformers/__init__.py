"""Transformers of Hugging Face by configuration (`hf:gpt2`), their step times, and generation."""
