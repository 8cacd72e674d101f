"""Whole models with random weights, each a `flexvarlen.verify.experiment`."""
