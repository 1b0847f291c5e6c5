"""What is known of code without any model: syntax, security audit, errors, refactoring, project rules."""
