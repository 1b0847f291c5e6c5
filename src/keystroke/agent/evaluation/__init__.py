"""How well models do tasks, and in what time."""
