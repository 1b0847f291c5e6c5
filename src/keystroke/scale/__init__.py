"""More than one machine: the same gateways and engines as replicas of a Ray Serve application."""
