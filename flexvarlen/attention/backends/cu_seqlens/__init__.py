"""Kernels that take cu_seqlens: FlashAttention 2, 3 and 4, and those built into torch."""
