"""Tool calls: the tools shown to a model, the grammar of its calls, and their parsers."""
