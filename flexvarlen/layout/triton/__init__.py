"""Triton kernels for the layout, and the launcher that all our Triton kernels use."""
