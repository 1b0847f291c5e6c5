"""Builds fixes as edits from a match and its syntax."""
