"""Fixes as edits: built from a match and its syntax, offered only where they are known to be right."""
