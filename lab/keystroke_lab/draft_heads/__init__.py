"""Draft heads: one layer that reads a large model's features and predicts its next tokens.

The target is frozen and decides every token, so a head changes its speed and never its text. The modules in
order of use: `sources`, `prompts`, `generation`, `texts`, `batches`, `training`, `evaluation`, `export`.
"""
