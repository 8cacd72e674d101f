"""The attention backends, one module each; `registry.py` looks them up by name."""
