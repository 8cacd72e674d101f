"""`backend="auto"`: the fastest kernel of the nearest shipped record, or of your own measurements.

The chosen kernel is checked once against the reference.
"""
