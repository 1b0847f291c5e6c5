"""The gateway: the server between clients and engines."""
