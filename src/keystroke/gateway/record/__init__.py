"""Stored data: responses, usage, keys, suggestion outcomes; and metrics."""
