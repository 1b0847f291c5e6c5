"""Keystroke: a real-time coding system anyone can run."""
