"""Which keys each query sees, as int32 vectors, and the masks derived from them."""
