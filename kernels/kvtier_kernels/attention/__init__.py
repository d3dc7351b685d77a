"""Attention over paged KV: dispatch, Triton kernels, the path of CPUs."""
