"""Attention alone, on random tensors: suites on one engine."""
