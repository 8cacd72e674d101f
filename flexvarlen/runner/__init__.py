"""Resumable runs of frozen cases: each gives records, and a kill loses the case in flight."""
