"""Qwen2 (and 2.5) and Qwen3, dense: causal attention, with sliding windows on some layers if the config says so.

The window reaches the attention function as `sliding_window`, and counts inside a document.
"""

MODEL_TYPES = ("qwen2", "qwen3")
