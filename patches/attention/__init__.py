"""The attention functions that transformers calls, and the choice of a backend for each layer."""
