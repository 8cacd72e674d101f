"""Recurrent layers over documents and trees: convolutions, and scans (gated delta rule, Mamba-2).

| module | holds |
|---|---|
| `layer_functions.py` | what replaces transformers' functions: the convolution and the scans |
| `documents.py` | the documents of a row, as these need them |
| `convolution.py`, `triton/` | the short convolution |
| `fla_kernels/` | fla's scans as operators; states that pass along trees; the check before use |
| `fla_configs/` | stored configurations of fla's kernels |
| `adjacent_ranks.py` | what ranks send each other where a document continues on the next |
"""
