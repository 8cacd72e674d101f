"""`backend="auto"`: the fastest kernel by the nearest shipped record or by your measurements.

The chosen kernel is checked once against the reference.
"""
