"""Code analysis without a model: syntax, security audit, errors, refactoring, project rules."""
