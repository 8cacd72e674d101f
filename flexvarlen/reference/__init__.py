"""The reference: each document alone in fp64, and the rule that says which errors are accepted.

Imports torch only, so that `auto`, verify, bench and tests can all use it.
"""
