"""Triton kernels of the layout, and the launcher that all of ours go through."""
