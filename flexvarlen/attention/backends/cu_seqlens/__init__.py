"""The kernels that take cu_seqlens: FlashAttention 2, 3 and 4, and torch's own."""
