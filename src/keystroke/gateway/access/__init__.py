"""Access control: keys, origins and rate limits."""
