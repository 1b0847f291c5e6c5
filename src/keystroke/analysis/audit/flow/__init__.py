"""Data flow inside a function: values, statements, and what libraries do to data."""
