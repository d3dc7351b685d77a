"""Memory for tests of kernels: any bytes, and more of it than there is."""

import mmap

import torch
from torch import Tensor

MAP_NORESERVE = 0x4000
"""Linux; Python 3.11 has no name for it."""


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def sparse(num_bytes: int) -> Tensor:
    """uint8 zeros of which only the pages that are touched take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
