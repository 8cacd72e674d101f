"""Which model types are verified, and what each needs."""
