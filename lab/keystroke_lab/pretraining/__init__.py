"""Pretraining: training sequences, data plans and the two kinds of run."""
