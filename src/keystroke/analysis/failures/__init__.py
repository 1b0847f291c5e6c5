"""What a program said when it failed: tracebacks and stack traces, their place in the project, and fixes."""
