"""The gateway: the one place that sees both the wire and the engines."""
