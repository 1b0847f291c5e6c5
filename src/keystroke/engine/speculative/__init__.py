"""Drafters: guesses at the tokens to come, which the engine verifies in one step."""
