"""Grammar-constrained decoding: the language an answer must be written in, held while it is generated."""
