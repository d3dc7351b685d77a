"""The engine's KV memory: one tensor of blocks."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.identity.namespace import Namespace
from kvtier_engine.model.kv_groups import ONE_GROUP, KVGroups
from kvtier_engine.model.model_config import ModelConfig
from kvtier_kernels.records import DTYPES as RECORD_DTYPES
from kvtier_kernels.records import LossyCodec, RecordLayout

PHYSICAL_LAYOUT = "L2NHD"
"""Inside a block: layer, key or value, token, KV head, head dimension."""
_GROUPED_LAYOUT = f"{PHYSICAL_LAYOUT}-grouped"
"""The layout of a block that has the layers of one KV group."""
BACKENDS = {"cpu": "torch-cpu", "cuda": "torch-cuda"}
"""Names of backends, by type of device. The two round differently, in every matrix product that leads to KV."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PagedKV:
    """KV of `num_blocks` blocks. Block-first, so that a block of all its layers is one contiguous range of bytes.

    The scheduler thread writes blocks in `forward`; movers copy whole blocks in and out, only such as the
    scheduler does not touch meanwhile.
    """

    tensor: Tensor
    """`[num_blocks, num_layers, 2, tokens_per_block, num_kv_heads, head_dim]`, contiguous. The layers are all of the
    model, or as many as a KV group has."""
    groups: KVGroups = field(default=ONE_GROUP, kw_only=True)

    @property
    def num_blocks(self) -> int:
        return self.tensor.size(0)

    @property
    def tokens_per_block(self) -> int:
        return self.tensor.size(3)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the payload of every tier, unless a lossy codec makes it smaller."""
        return self.tensor.stride(0) * self.tensor.element_size()

    @property
    def is_arriving(self) -> bool:
        """Whether a forward pass that begins now may wait for a load."""
        return False

    def layer(self, index: int) -> Tensor:
        """`[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`, a view; the layer's own are the blocks of its
        group."""
        return self.tensor[:, self.groups.place(index)]

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the KV of the first `num_tokens` tokens of a block into another one, in the order of computation."""
        self.tensor[target, :, :, :num_tokens].copy_(self.tensor[source, :, :, :num_tokens])

    def record_layout(self, lossy_codec: str) -> RecordLayout:
        """The layout of a block, which is one page, in the form of this codec.

        :raises ConfigError: it does not take KV of this dtype.
        """
        if self.tensor.dtype not in RECORD_DTYPES:
            raise ConfigError(
                f'engine.lossy_codec: "{lossy_codec}" takes KV of 16 bits: set engine.dtype to "bfloat16", '
                'or engine.lossy_codec to "none"'
            )
        head_dim = self.tensor.size(-1)
        return RecordLayout(LossyCodec(lossy_codec), self.tensor.dtype, head_dim, self.tensor[0].numel() // head_dim)

    def byte_rows(self) -> Tensor:
        """uint8 `[num_blocks, block_bytes]`, a view of the same memory: what movers copy."""
        return self.tensor.view(self.num_blocks, -1).view(torch.uint8)


def allocate_kv(
    config: ModelConfig,
    num_blocks: int,
    tokens_per_block: int,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    groups: KVGroups = ONE_GROUP,
) -> PagedKV:
    """Zeroed, and thereby pre-faulted: a first touch inside a step would cost ten times a copy."""
    shape = (num_blocks, *_block_shape(config, tokens_per_block, groups))
    return PagedKV(torch.empty(shape, dtype=dtype, device=device).zero_(), groups=groups)


def bytes_per_block(
    config: ModelConfig, tokens_per_block: int, dtype: torch.dtype, groups: KVGroups = ONE_GROUP
) -> int:
    """`PagedKV.block_bytes`, before there is one."""
    return math.prod(_block_shape(config, tokens_per_block, groups)) * dtype.itemsize


def _block_shape(config: ModelConfig, tokens_per_block: int, groups: KVGroups) -> tuple[int, ...]:
    num_layers = groups.num_layers or config.num_hidden_layers
    return (num_layers, 2, tokens_per_block, config.num_key_value_heads, config.head_dim)


_OF_GEMMA = (
    "is_gemma",
    "attention_scale",
    "attention_soft_cap",
    "final_soft_cap",
    "sliding_window",
    "windowed_layers",
    "windowed_rope_theta",
)
"""What `ModelConfig` has for Gemma alone."""


def _model_digest(config: ModelConfig, weights_digest: bytes) -> bytes:
    """The digest of the weights and of their use: an edited rope or epsilon gives other KV from the same weights."""
    arithmetic = asdict(config)
    for beside in ("eos_token_ids", "max_position_embeddings"):
        del arithmetic[beside]
    for name in _OF_GEMMA if not config.is_gemma else ():  # models of before keep their digests
        del arithmetic[name]
    packed = json.dumps(arithmetic, sort_keys=True).encode()
    return hashlib.sha256(b"kvtier.model.v1" + weights_digest + packed).digest()


def kv_namespace(  # noqa: PLR0913 - what decides the bytes
    config: ModelConfig,
    weights_digest: bytes,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    *,
    lossy_codec: str = "",
    fingerprint: str = "",
    groups: KVGroups = ONE_GROUP,
) -> Namespace:
    """Which bytes the blocks of this engine hold.

    :param lossy_codec: in whose form they leave the device; empty for as they are.
    :param fingerprint: `arithmetic_fingerprint` of a batch invariant model; empty for others, whose bits depend on more
        than that.
    """
    name = str(dtype).removeprefix("torch.")
    return Namespace(
        weights_digest=_model_digest(config, weights_digest),
        dtype=name,
        kv_dtype=name,
        physical_layout=_GROUPED_LAYOUT if groups.num_windowed else PHYSICAL_LAYOUT,
        backend=BACKENDS[device.type] + (f"-invariant-{fingerprint}" if fingerprint else ""),
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        lossy_codec=lossy_codec,
    )
