"""Declarative rules and how they are matched against the data flow."""
