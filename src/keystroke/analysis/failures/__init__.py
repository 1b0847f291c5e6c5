"""Failures in a program's output: tracebacks and stack traces, their position in the project, and fixes."""
