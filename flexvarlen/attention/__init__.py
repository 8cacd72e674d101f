"""`packed_attention`, the kernels behind it, and how `backend="auto"` chooses one."""
