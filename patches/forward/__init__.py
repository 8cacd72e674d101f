"""A patched model's forward, step by step."""
