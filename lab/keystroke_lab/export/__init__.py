"""Trained weights as GGUF files and Hugging Face folders."""
