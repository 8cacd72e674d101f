"""Llama 1 to 3: plain causal attention, grouped-query or not."""

MODEL_TYPES = ("llama",)
