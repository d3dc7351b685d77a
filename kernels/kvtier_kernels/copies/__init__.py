"""Copies between paged KV and staging, as Triton kernels."""
