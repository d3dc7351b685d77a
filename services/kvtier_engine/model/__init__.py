"""The model: weights, paged KV, forward pass, CUDA graphs."""
