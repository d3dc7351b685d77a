"""Processes that benchmarks measure, or measure beside."""
