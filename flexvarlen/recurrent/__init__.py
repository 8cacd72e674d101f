"""Convolutions and scans (gated delta rule, Mamba-2) that start anew at each document."""
