"""An adapter: a small correction of a model's linear layers that teaches it to edit.

The base model never changes. Lessons in, a file of low-rank matrices out.
"""
