"""Fixes written by a model, for failures that no rule repairs."""
