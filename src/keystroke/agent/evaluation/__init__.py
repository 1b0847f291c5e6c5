"""Measures how well models solve tasks, and in what time."""
