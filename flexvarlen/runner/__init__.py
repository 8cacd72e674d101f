"""Resumable runs of frozen cases: each gives records, and a killed run loses only its last case."""
