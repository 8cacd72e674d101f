"""`packed_attention`, its kernels, and how `backend="auto"` chooses one."""
