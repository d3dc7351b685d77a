"""A CUDA device that exists only in virtual time: streams, events and copies, for machines without a GPU.

`timeline` has the clock, `device` runs what streams hold, `cuda` looks like `torch.cuda`, `launches` puts copies on
streams instead of doing them, and `executors` are thread pools whose threads the clock waits for.
"""
