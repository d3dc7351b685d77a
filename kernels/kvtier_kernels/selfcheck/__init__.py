"""Every Triton kernel against its reference on the GPU at hand: `python -m kvtier_kernels.selfcheck`."""
