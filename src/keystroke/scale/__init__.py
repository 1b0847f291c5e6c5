"""Gateways and engines as replicas of a Ray Serve application."""
