"""Making our own model: corpus, tokenizer, training, export and evaluation.

Nothing here runs while someone types. This package may use the engine and the assistant's prompt
formats; neither knows of it. torch is imported only by the modules that train or export.
"""
