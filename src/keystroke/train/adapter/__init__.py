"""An adapter: a small correction of a model's linear layers that teaches it to edit.

Law: the base model never changes. Lessons in, a file of low-rank matrices out.
"""
