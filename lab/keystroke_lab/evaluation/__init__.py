"""How models are compared: completion cases, next edits, perplexity."""
