"""Qwen2 (and 2.5) and Qwen3, dense: causal attention.

Some layers have a sliding window, if the config says so. It reaches the attention function as
`sliding_window`, and counts inside a document.
"""

MODEL_TYPES = ("qwen2", "qwen3")
