"""What the models are asked for: each feature with its prompt and its parser side by side."""
