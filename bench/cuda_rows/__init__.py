"""The parts of bench/cuda.py that run in processes of their own."""
