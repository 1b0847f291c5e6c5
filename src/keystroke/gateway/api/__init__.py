"""The endpoints other programs know: Responses, chat, completions, infill, models."""
