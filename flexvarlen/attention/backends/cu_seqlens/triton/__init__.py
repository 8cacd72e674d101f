"""Small Triton kernels around attention over cu_seqlens."""
