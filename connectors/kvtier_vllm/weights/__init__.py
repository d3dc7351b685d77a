"""Weights that change at run time."""
