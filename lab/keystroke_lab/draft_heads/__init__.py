"""A draft head: one layer that reads a large model's features and guesses its next tokens.

The target is frozen and decides every token; what is made here changes how fast it speaks, never what.
The files in order of use: code -> asks -> target (writes) -> texts -> features -> training -> evaluation ->
export. `engine/speculative/draft_head.py` reads what is exported.
"""
