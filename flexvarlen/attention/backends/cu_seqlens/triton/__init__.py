"""Small Triton kernels that run before and after attention over cu_seqlens."""
