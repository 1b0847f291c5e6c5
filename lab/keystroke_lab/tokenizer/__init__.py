"""The tokenizer of our own models."""
