"""A text before it is judged: its pieces, its syntax lowered to one neutral form, its suppressions."""
