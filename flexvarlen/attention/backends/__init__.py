"""The attention kernels, one module each; `registry.py` has them by name."""
