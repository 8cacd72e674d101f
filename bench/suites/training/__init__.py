"""Whole trainings on real texts: packed and padded, from scratch, and on several GPUs."""
