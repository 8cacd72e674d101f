"""The version, by itself: whatever needs it imports nothing else."""

__version__ = "0.1.0"
