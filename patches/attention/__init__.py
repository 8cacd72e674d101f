"""The functions that transformers calls, and which backend serves which layers."""
