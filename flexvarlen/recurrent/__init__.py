"""Recurrent layers over documents and trees: convolutions, and scans (gated delta rule, Mamba-2).

| module | holds |
|---|---|
| `layer_functions.py` | replacements of transformers' functions: the convolution and the scans |
| `documents.py` | the documents of a row, as convolution and scans need them |
| `convolution.py`, `triton/` | the short convolution |
| `fla_kernels/` | fla's scans as operators; states that pass along trees; the check before use |
| `fla_configs/` | stored configurations of fla's kernels |
| `adjacent_ranks.py` | exchange between ranks if a document continues on the next one |
| `tree_parts.py` | what passes from part to part of a tree that runs in parts |
"""
