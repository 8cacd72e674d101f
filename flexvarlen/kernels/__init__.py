"""Triton kernels; imported only where a GPU is."""
