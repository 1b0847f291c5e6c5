"""Engines: tokens in, tokens out. Nothing here depends on the wire format, the gateway or an editor."""
