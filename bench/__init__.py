"""Measurements, one file each: `make bench-NAME`, or `python -m bench.NAME` in the checkout."""
