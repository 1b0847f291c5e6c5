"""Tool calls: what a model is told of its tools, the grammar it calls them in, and reading its calls."""
