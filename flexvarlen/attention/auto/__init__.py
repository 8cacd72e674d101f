"""`backend="auto"`: choose the fastest kernel for the user's shapes, measured once and cached."""
