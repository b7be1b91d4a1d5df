"""Hugging Face's models by configuration, without weights: `hf:gpt2`, `hf:llama-2-7b,lora=16`."""
