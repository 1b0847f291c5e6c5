"""Fixes written by a model, for what no rule mends."""
