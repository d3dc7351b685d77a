"""The namespace: which bytes a block holds. Engines whose bytes differ in any way never meet.

Only content counts: the weights' digest is over the weights, not their path, name or time, so two
hosts with the same weights at different paths share blocks.
"""

import dataclasses
import hashlib
from dataclasses import dataclass

import msgpack

from kvtier.errors import InvalidInputError
from kvtier.identity.keys import NAMESPACE_ID_BYTES, NamespaceId

LAYOUT_VERSION = 1
_LABEL = "kvtier.namespace.v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that decides the bytes of a block besides its tokens."""

    weights_digest: bytes
    """32 bytes, SHA-256 over the weights' content."""
    dtype: str
    """Dtype of the computation, e.g. `bfloat16`."""
    kv_dtype: str
    """Dtype of the cached KV, e.g. `bfloat16` or `fp8_e4m3`."""
    physical_layout: str
    """Order of dimensions inside a block, e.g. `L2NHD`."""
    backend: str
    """Attention backend whose layout and rounding the bytes carry, e.g. `torch-cpu`."""
    num_layers: int
    num_kv_heads: int
    """KV heads of this rank."""
    head_dim: int
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    kv_group: int = 0
    lossy_codec: str = ""
    """Name of a codec that changes bytes, e.g. `int8_per_head` (`kvtier_kernels.records`); empty for lossless ones."""
    layout_version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        if len(self.weights_digest) != 32:
            raise InvalidInputError(f"weights_digest of {len(self.weights_digest)} bytes: needs the 32 of a SHA-256")
        if not 0 <= self.tp_rank < self.tp_size or not 0 <= self.pp_rank < self.pp_size:
            raise InvalidInputError(
                f"rank tp {self.tp_rank}/{self.tp_size}, pp {self.pp_rank}/{self.pp_size}: rank must be below size"
            )

    @property
    def id(self) -> NamespaceId:
        """16 bytes of SHA-256 over canonical msgpack of all fields, in declaration order."""
        fields = [getattr(self, f.name) for f in dataclasses.fields(self)]
        packed: bytes = msgpack.packb([_LABEL, *fields], use_bin_type=True)
        return NamespaceId(hashlib.sha256(packed).digest()[:NAMESPACE_ID_BYTES])
