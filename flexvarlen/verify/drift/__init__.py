"""A whole model, and steps of training, in several variants that should agree."""
