"""Features that use models, each with its prompt and its parser side by side."""
