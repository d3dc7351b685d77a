"""The bits by which a model's arithmetic is known."""

import hashlib

import torch

from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.paged_kv import allocate_kv

_NUM_TOKENS = 32
_STRIDE = 7919
_ARITHMETIC = b"kvtier.arithmetic.2"
"""Another one where the same tokens get other bits in ways that this short prompt does not show."""


def arithmetic_fingerprint(model: LlamaModel, config: ModelConfig, dtype: torch.dtype) -> str:
    """16 hex digits of the KV that a fixed prompt gives. Computes one step, into memory of its own.

    Machines with other matrix units, another library or another number of threads may sum in another order. A batch
    invariant engine that took their KV would answer as they do, not as it does itself; so engines whose fingerprints
    differ do not share.
    """
    kv = allocate_kv(config, 1, _NUM_TOKENS, dtype, model.device)
    model.forward([Chunk([index * _STRIDE % config.vocab_size for index in range(_NUM_TOKENS)], 0, [0])], kv)
    kernels = _kernels_on(model.device)
    return hashlib.sha256(_ARITHMETIC + kernels + kv.byte_rows().cpu().numpy().tobytes()).hexdigest()[:16]


def _kernels_on(device: torch.device) -> bytes:
    """Chip and compiler: other tiles of keys give other bits only to prompts of more than one of them."""
    if device.type != "cuda":
        return b""
    import triton

    return f"{torch.cuda.get_device_capability(device)} triton {triton.__version__}".encode()
