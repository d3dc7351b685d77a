"""Rounds, spreads and reports: what all benchmarks have in common."""
