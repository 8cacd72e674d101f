"""The version, in one place: the build reads it here too. This file imports nothing."""

__version__ = "0.2.0"
