"""How Keystroke's models are made: corpus, tokenizer, pretraining, adapters, draft heads, evaluation.

Not part of the wheel: `make lab` installs it and `keystroke train` runs it. The product never imports it.
"""
