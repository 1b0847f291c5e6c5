"""What is kept of what happened: responses, usage, metrics."""
