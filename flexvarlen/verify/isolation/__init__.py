"""Isolation beyond the function: the command, the Trainer callback and the pytest fixture."""
