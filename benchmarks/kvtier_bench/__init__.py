"""Benchmarks: ratios in one run, interleaved pairs, medians with spread, hardware and commit in the header."""
