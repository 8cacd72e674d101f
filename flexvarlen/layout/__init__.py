"""Where documents begin and end: `PackedLayout`, its checks, and what kernels are launched for."""
