"""`backend="auto"`: the fastest kernel on the user's own shapes, measured once and kept."""
