"""The reference: each document alone in fp64, and the rule that says what is near enough to it.

Imports torch only, so that `auto`, verify, bench and tests can all use it.
"""
