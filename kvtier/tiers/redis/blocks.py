"""How blocks lie in a Redis: packing, time to live, and how large one value may be."""

from dataclasses import dataclass

from kvtier.codec.stored_form import parse_stored_header
from kvtier.errors import CorruptBlockError
from kvtier.tiers.common.packer import BlockPacker
from kvtier.tiers.redis.commands import MAX_PARTS, part_names


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What readers and writers of one tier have in common."""

    packer: BlockPacker
    ttl_ms: int
    """Time to live of a value after its last use, in milliseconds; 0 for ever."""
    max_value_bytes: int
    """Payload bytes, as stored, in one value."""

    def num_parts(self, stored_length: int) -> int:
        """How many values hold a payload of so many bytes."""
        return max(1, -(-stored_length // self.max_value_bytes))

    def further_parts(self, name: bytes, head: bytes) -> list[bytes]:
        """Names of the parts after the first, of a block whose value begins with `head`; none for no block."""
        try:
            header = parse_stored_header(head)
        except CorruptBlockError:
            return []
        return part_names(name, header.fingerprint, min(self.num_parts(header.stored_length), MAX_PARTS))
