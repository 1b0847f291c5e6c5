"""The MLX engine: models on the GPU of Apple silicon. On Linux, MLX's CPU build runs the same code."""
