"""Adapters: low-rank matrices that teach a base model to edit, without changing the base."""
