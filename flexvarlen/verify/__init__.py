"""Checks of models: does anything leak, are the numbers right, how far do two runs differ?"""
