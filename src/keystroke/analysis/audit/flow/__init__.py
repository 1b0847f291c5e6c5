"""Data flow inside a function: what is known of each value, and what libraries do to it."""
