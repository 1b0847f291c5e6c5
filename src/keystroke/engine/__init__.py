"""Engines: tokens in, tokens out. Nothing here knows the wire, the gateway or an editor."""
